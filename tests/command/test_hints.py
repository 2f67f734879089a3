"""Hints: the remedy of a frequent mistake, as a line of its own below the error."""

import pytest
import yaml

from pl_fed.command.hints import _OPTIONS, find_hint, format_error, name_config_path
from pl_fed.command.main import main

QUICKSTART = ["--config", "configs/quickstart.yaml", "--trainer.max_epochs", "0"]
FRACTION = "for 20 %, set --federation.adversary.fraction 0.2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--trainer.rounds", "10"], "a run has --trainer.max_epochs rounds"),
        (["--trainer.num_rounds=10"], "a run has --trainer.max_epochs rounds"),
        (["--cohort_size", "5"], "did you mean --federation.sampler.cohort_size?"),
        (["--model.learning_rate=1"], None),  # the message itself lists the options
        (
            ["--federation.adversary.fraction=20"],
            "for 20 %, set --federation.adversary.fraction 0.2",
        ),
        (["--trainer.seed=1"], "did you mean --seed_everything?"),
        (["--data.nothing_alike=1"], None),
        (["--data.bach_size", "3"], "did you mean --data.batch_size?"),
        (["--federation.agregator", "Median"], "did you mean --federation.aggregator?"),
        (["--trainer.acelerator=cpu"], "did you mean --trainer.accelerator?"),
        (["--data.partitioner=Nothing"], "`python -m pl_fed list partitioners` lists the classes"),
    ],
)
def test_error_is_followed_by_its_hint(arguments, hint, capsys, monkeypatch, request, tmp_path):
    monkeypatch.chdir(request.config.rootpath)
    root = ["--trainer.default_root_dir", str(tmp_path)]
    with pytest.raises(SystemExit):
        main(["fit", *QUICKSTART, *root, *arguments])
    lines = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith(("error", "hint"))
    ]
    assert lines[0].startswith("error: Expected ")
    assert lines[1:] == ([f"hint: {hint}"] if hint else [])


@pytest.mark.slow
def test_every_synonym_names_an_existing_option(capsys, request, monkeypatch):
    """The hint of a moved option would be wrong."""
    monkeypatch.chdir(request.config.rootpath)
    with pytest.raises(SystemExit):
        main(["fit", *QUICKSTART, "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    for path in set(_OPTIONS) - {"federation.server_optimizer.lr"}:  # null by default
        node = config
        for name in path.split("."):
            node = node.get("init_args", node) if "class_path" in node else node
            assert name in node, path
            node = node[name]


def test_hint_for_a_partial_config_is_the_command_of_its_first_line(tmp_path):
    layer = tmp_path / "layer.yaml"
    command = "python -m pl_fed fit --config base.yaml --config layer.yaml"
    layer.write_text(f"# {command}\nmodel: Ditto\n")
    message = "Expected argument `data.dataset` to be set but got none."
    for arguments in (["fit", "--config", str(layer)], ["fit", f"--config={layer}"]):
        hint = find_hint(message, arguments)
        assert hint is not None
        assert hint.endswith(f"run {command}")
    other = find_hint(message, ["fit", "--config", str(tmp_path / "none.yaml")])
    expected = "put a config with the section data first, for example"
    assert other == f"{expected} --config quickstart"


def test_hint_for_a_checkpoint_without_a_config_is_the_config_of_its_run(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    message = "Expected argument `data.dataset` and `model` to be set but got none."
    place = tmp_path / "checkpoints" / "last.ckpt"
    commands = (["--ckpt_path", str(tmp_path)], [f"--ckpt_path={place}"])
    for command in commands:
        assert "--config quickstart" in find_hint(message, ["test", *command])
    (tmp_path / "config.yaml").touch()
    for command in commands:
        expected = f"put the config of the run first: --config {tmp_path / 'config.yaml'}"
        assert find_hint(message, ["test", *command]) == expected


def test_hint_quotes_the_config_of_a_run_in_a_folder_with_a_space(tmp_path):
    run = tmp_path / "my runs"
    run.mkdir()
    (run / "config.yaml").touch()
    message = "Expected argument `data.dataset` and `model` to be set but got none."
    hint = find_hint(message, ["test", "--ckpt_path", str(run)])
    assert hint == f"put the config of the run first: --config '{run}/config.yaml'"


def test_hint_for_a_layer_by_name_is_a_command_with_names():
    message = "Expected argument `data.dataset` to be set but got none."
    hint = find_hint(message, ["fit", "--config", "ditto"])
    command = "python -m pl_fed fit --config fashion_mnist --config ditto"
    assert hint == f"ditto is one of several layers: run {command}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["--federation.engine.name", "stackd"], "stacked"),
        (["--trainer.logger", "Wandb"], "WandbLogger"),
        (["--model.help", "Dito"], "Ditto"),
        (["--model", "Dito"], "Ditto"),
    ],
)
def test_misspelled_word_is_followed_by_a_suggestion(arguments, suggestion, capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", "quickstart", *arguments])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert line.endswith(f" (did you mean {suggestion}?).")


def test_constructor_error_and_cohort_are_named_by_their_paths():
    tree = "Does not validate against any of the Union subtypes\nErrors:\n  - Expected argument"
    config = {"model": {"lam": -1}, "federation": {"sampler": {"init_args": {"cohort_size": 3}}}}
    named = name_config_path(f"{tree} `lam` to be at least 0 but got -1.", config)
    assert named == "Expected argument `model.lam` to be at least 0 but got -1."
    few = "Expected argument `uploads` to have at least 5 rows for Krum, with f = 2, but got {}: x."
    named = name_config_path(few.format(3), config)
    assert named == (
        "Expected argument `federation.sampler.cohort_size` to be at least 5 for Krum, with f = 2"
        " but got 3: x."
    )
    assert find_hint(named) == "set --federation.sampler.cohort_size to 5 or more"
    assert name_config_path(few.format(2), config) == few.format(2), "some uploads are broken"


def test_hint_names_a_config_with_a_similar_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart.yaml").touch()
    message = (
        f"Expected argument `config` to be a file but found none at '{tmp_path}/quikstart.yml'."
    )
    assert find_hint(message) == "did you mean quickstart.yaml?"
    assert find_hint(message, ["fit", "--config", "quikstart.yml"]) == "did you mean quickstart?"
    (tmp_path / "quickstart.yaml").unlink()
    assert find_hint(message) == "did you mean quickstart?"
    unlike = message.replace("quikstart", "zzz")
    assert find_hint(unlike) == "`python -m pl_fed list configs` lists the names of configs"


def test_hint_for_a_wrong_subcommand_keeps_the_arguments():
    message = "Expected a subcommand, one of fit, validate, but got 'ft'."
    hint = find_hint(message, ["ft", "--config", "x y.yaml"])
    assert hint == "did you mean python -m pl_fed fit --config 'x y.yaml'?"


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"model": {"class_path": "Ditto", "init_args": {"lam": 1.0}}}, "model.lam"),
        ({"model": {"lam": 1}, "federation": {"lam": 2}}, "lam"),  # two: either may be meant
        ({"data": {"rate": 1}}, "lam"),
        ({"lam": 1, "model": {"lam": 1}}, "lam"),
        ({"data": {"skews": [{"lam": 1}]}}, "lam"),  # of a list: not followed
    ],
)
def test_argument_is_named_by_its_unique_path(config, path):
    message = "Expected argument `lam` to be >= 0 but got -1: `lam` is a weight."
    named = name_config_path(message, config)
    assert named == f"Expected argument `{path}` to be >= 0 but got -1: `lam` is a weight."


def test_error_and_hint_are_two_lines_without_control_characters():
    message = "Expected only options that --help lists but got --trainer.rounds \x1b[31m."
    assert format_error(message) == (
        "error: Expected only options that --help lists but got --trainer.rounds \\x1b[31m.\n"
        "hint: a run has --trainer.max_epochs rounds\n"
    )
