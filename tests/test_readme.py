"""The Python, YAML and commands of the READMEs work unchanged."""

import importlib
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from made_data import write_mnist

from pl_fed import data
from pl_fed.clients import Client, Model
from pl_fed.command.main import main
from pl_fed.data import Digits

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
ROOMS = sorted(ROOT.glob("pl_fed/*/README.md"))  # the README of a room of the package
SHORT = ["--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false"]


class Endless(torch.utils.data.Dataset):
    """A data set without IndexError beyond its length: `[*dataset]` never ends."""

    def __len__(self):
        return 6

    def __getitem__(self, place):
        return torch.ones(2) * place, place


def blocks(language, text=TEXT):
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def block(language, words):
    (blocks_of_words,) = [text for text in blocks(language) if words in text]
    return blocks_of_words


def commands(text=TEXT):
    """The fits of a README, each as a list of arguments."""
    lines = "".join(blocks("bash", text)).replace("\\\n", " ").splitlines()
    arguments = [shlex.split(line, comments=True) for line in lines]
    return [words[3:] for words in arguments if words[:4] == ["python", "-m", "pl_fed", "fit"]]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the README's own files in it, and the configs where it has them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "my_net.py").write_text(block("python", "# my_net.py"))
    (tmp_path / "my_algorithm.py").write_text(block("python", "# my_algorithm.py"))
    return tmp_path


@pytest.mark.slow
def test_python_example_of_a_fit_reaches_some_accuracy(folder, capsys):
    exec(block("python", "import pl_fed\n"), {})
    assert 0.5 < float(capsys.readouterr().out.splitlines()[-1]) <= 1


def test_examples_of_a_torch_data_set_and_of_tensors_load():
    names = {"data": data, "my_dataset": Endless(), "my_owners": torch.tensor([2, 0, 1, 1, 2, 0])}
    exec(block("python", "data.TorchDataset"), names)
    assert names["mine"].clients.owners == [["0"], ["1"], ["2"]]
    names["x"], names["y"] = torch.ones(6, 2), torch.arange(6)
    exec(block("python", "class Mine"), names)
    assert names["Mine"]().load().names == ["Ada", "Bo", "Cy"]
    arrays = data.TorchDataset(Endless()).load()
    assert arrays.inputs.tolist() == [[k, k] for k in range(6)]
    assert arrays.targets.tolist() == [0, 1, 2, 3, 4, 5]


def test_example_test_of_an_algorithm_passes(folder):
    exec(block("python", "client.new_round"), {})


def test_example_of_users_data_fits(folder):
    exec(block("python", "np.savez"), {})
    (folder / "mine.yaml").write_text(block("yaml", "# mine.yaml"))
    layers = ["--config", "configs/quickstart.yaml", "--config", "mine.yaml"]
    main(["fit", *layers, *SHORT])
    (table,) = folder.glob("runs/quickstart/*/per_client.csv")
    assert len(table.read_text().splitlines()) == 1 + 12


@pytest.mark.slow
def test_example_of_an_export_gives_logits(folder, capsys):
    main(["fit", "--config", "configs/quickstart.yaml", *SHORT])
    (run,) = folder.glob("runs/quickstart/*")
    words = block("bash", "--select validation").replace(
        "runs/quickstart/20261120-231611", str(run)
    )
    for line in words.splitlines():
        main(shlex.split(line)[3:])
    capsys.readouterr()
    names = {}
    exec(block("python", "manifest.json"), names)
    assert capsys.readouterr().out.strip() in block("python", "manifest.json")
    assert torch.equal(names["x"], Digits().load().inputs), "as the run's data went into the net"
    assert names["logits"].shape == (1797, 10)
    assert len(list(run.glob("exports/*/client_*.pt2"))) == 2


@pytest.mark.slow
def test_example_of_a_report_runs(folder):
    main(["fit", "--config", "configs/quickstart.yaml", *SHORT])
    main(shlex.split(block("bash", "pl_fed report"), comments=True)[3:])
    assert "Ditto" in (folder / "runs" / "report" / "report.html").read_text()


def test_readme_has_fit_commands():
    assert len(commands()) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("arguments", commands(), ids=lambda words: "-".join(words)[:60])
def test_command_runs(folder, arguments, monkeypatch):
    if "fashion_mnist" in " ".join(arguments):
        write_mnist(folder / "data", "FashionMNIST")
        monkeypatch.setenv("PL_FED_DATA", str(folder / "data"))
    if arguments[-1] in ("--help", "--print_config"):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 0
        return
    if "last" in arguments:
        main(["fit", *arguments[1:3], *SHORT])
    if "ddp" in arguments:  # processes are started by the command that runs
        subprocess.run([sys.executable, "-m", "pl_fed", *arguments, *SHORT], check=True)
    else:
        main([*arguments, *SHORT])
    assert list(folder.glob("runs/*/*/per_client.csv"))


def test_paths_in_the_readme_exist():
    named = re.findall(r"(?:configs|experiments)/[\w/]+\.(?:yaml|py)", TEXT)
    assert named
    for name in named:
        assert (ROOT / name).is_file(), name
    for name in re.findall(r"^\| .* \| `(\w+)/`", TEXT, flags=re.MULTILINE):
        if name != "wandb":
            assert (ROOT / "pl_fed" / name).is_dir(), name


def test_example_config_is_yaml():
    assert yaml.safe_load(block("yaml", "# mine.yaml"))["data"]["partitioner"] is None


@pytest.mark.slow
@pytest.mark.parametrize("readme", ROOMS, ids=lambda path: path.parent.name)
def test_code_of_a_package_readme_runs(readme, tmp_path, monkeypatch):
    """Each Python block is a file, named in its first line; its tests pass and its fits run."""
    if readme.parent.name == "privacy":
        pytest.importorskip("dp_accounting", reason="the extra pl_fed[privacy] is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    text = readme.read_text()
    files = [re.match(r"# (\w+)\.py\n", code).group(1) for code in blocks("python", text)]
    for name, code in zip(files, blocks("python", text)):
        (tmp_path / f"{name}.py").write_text(code)
    assert files or "```" not in text
    try:
        for name in files:
            for member, value in vars(importlib.import_module(name)).items():
                if member.startswith("test_"):
                    value()
        for arguments in commands(text):
            main([*arguments, *SHORT])
    finally:
        for name in files:
            sys.modules.pop(name, None)


@pytest.mark.parametrize("readme", ROOMS, ids=lambda path: path.parent.name)
def test_files_in_a_package_readme_exist(readme):
    text = re.sub(r"^```.*?^```", "", readme.read_text(), flags=re.DOTALL | re.MULTILINE)
    named = re.findall(r"`([\w/]+\.py)`", text)
    assert named
    for name in named:
        assert (readme.parent / name).is_file() or (ROOT / name).is_file(), name


def test_readme_of_the_algorithms_names_all_members_for_authors():
    text = (ROOT / "pl_fed" / "clients" / "README.md").read_text().replace("`self.", "`")
    named = set(re.findall(r"`(\w+)", text))
    serving = {
        *("objective", "mean_loss", "sample_losses", "refuse_batch_criterion"),
        *("averages_samples", "choose_task", "count_classes", "place", "sample_weights"),
    }
    members = {name for name in vars(Client) if not name.startswith("_")} - serving
    assert members - named == set()
    assert {field.name for field in fields(Model) if field.name not in text} == set()
