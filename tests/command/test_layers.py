"""Layers of a command line: later configs and options win, and a class keeps what it can."""

import pytest

from pl_fed.command.layers import FORMER, Option, merge_layers
from pl_fed.command.parser import RefusalError


def test_options_change_the_classes_of_configs(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "model: {class_path: Ditto, init_args: {lam: 1, net: {class_path: MLP}}}\n"
        "trainer: {callbacks: [Timer]}\n"
    )
    tree = merge_layers(
        [
            *("--config", str(file), "--model.lam", "2", "--model.net=CNN"),
            *("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=x"),
        ]
    )
    assert tree["model"]["class_path"] == "Ditto"
    assert str(tree["model"]["init_args"]["lam"]) == "2"
    assert str(tree["model"]["init_args"]["net"]["class_path"]) == "CNN"
    first, last = tree["trainer"]["callbacks"]
    assert first == "Timer"
    assert (last["class_path"], str(last["init_args"]["monitor"])) == ("EarlyStopping", "x")


def test_config_appends_to_the_lists_of_earlier_ones(tmp_path):
    for name, text in (("a", "callbacks: [Timer]"), ("b", "callbacks+: [EarlyStopping]")):
        (tmp_path / f"{name}.yaml").write_text(f"trainer: {{{text}}}\n")
    files = [str(tmp_path / f"{name}.yaml") for name in "ab"]
    tree = merge_layers(["--config", files[0], "--config", files[1]])
    assert tree == {"trainer": {"callbacks": ["Timer", "EarlyStopping"]}}


def test_arguments_of_a_former_class_are_set_apart():
    tree = merge_layers(['--model={"class_path": "A", "init_args": {"x": 1}}', "--model=B"])
    assert str(tree["model"]["class_path"]) == "B"
    assert tree["model"][FORMER] == {"x": 1}


def test_option_has_its_words():
    tree = merge_layers(["--data.num_clients", "3", "--model=null", "--seed_everything"])
    assert tree["data"]["num_clients"] == Option("--data.num_clients 3", "3")
    assert tree["model"] is None
    assert tree["seed_everything"].text is None


@pytest.mark.parametrize("words", [["stray"], ["--config"], ["--config", "none.yaml"]])
def test_words_that_are_no_options_are_refused(words):
    with pytest.raises(RefusalError, match=r"^Expected "):
        merge_layers(words)
