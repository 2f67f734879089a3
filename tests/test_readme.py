"""The code of all pages runs unchanged: Python, YAML and commands, in the order of the page."""

import importlib
import inspect
import re
import sys
from contextlib import redirect_stdout
from dataclasses import fields
from io import StringIO
from pathlib import Path

import pytest
import torch
import yaml
from further_cases import check_contained
from made_data import write_mnist
from pages import ROOT, Page, find_pages, split_commands
from study_processes import run as run_study

from pl_fed import aggregators, attacks, clients, compressors
from pl_fed.clients import Client, Model
from pl_fed.command.main import main
from pl_fed.command.start import run_light_command
from pl_fed.data import Digits
from pl_fed.studies.command import main as study_in_this_process

PAGES = find_pages("README.md")
README = Page(ROOT / "README.md")
ONE_ROUND = ["--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false"]
RUN_FOLDER = re.compile(r"(runs/\w+)/\d{8}-\d{6}")  # stands for a run of the page
NOT_RUN = {  # commands that change the machine, need an account, or take long
    *("make", "pip", "python3", ".", "export", "git", "wandb", "cd", "torchrun"),
    *(".pfl/bin/pip", ".pfl/bin/python"),
    *(".jax/bin/pip", ".jax/bin/python"),
}
LONG = [  # pages whose code takes over two seconds, and whose pieces have tests in their rooms
    *("configs/README.md", "experiments/bring_your_own/README.md"),
    *(f"pl_fed/{room}/README.md" for room in ("aggregators", "attacks", "command", "compressors")),
    *(f"pl_fed/{room}/README.md" for room in ("data", "engine", "exports", "partitioners")),
    *(f"pl_fed/{room}/README.md" for room in ("privacy", "studies", "systems")),
]
check_contained(LONG, [page.name for page in PAGES])
SHOWN_OUTPUT = re.compile(r"^print\(.*\)  # (.+)$", flags=re.MULTILINE)


class Reader:
    """Reader: runs the blocks of a page in a folder, like a user who types them.

    Args:
        folder: The empty working folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, object] = {}
        self.modules: list[str] = []

    def run(self, page: Page) -> None:
        """Run all blocks."""
        try:
            for language, code in page.blocks():
                getattr(self, f"run_{language or 'text'}")(code)
        finally:
            for name in self.modules:
                sys.modules.pop(name, None)

    def run_text(self, code: str) -> None:
        """Output of a command: nothing to run."""

    run_mermaid = run_latex = run_text

    def run_python(self, code: str) -> None:
        """Write a file that its first line names, and run its tests; run any other block."""
        if not (file := re.match(r"# (\w+)\.py\n", code)):
            self._run_script(code)
            return
        name = file.group(1)
        (self.folder / f"{name}.py").write_text(code)
        self.modules.append(name)
        importlib.invalidate_caches()
        for member, value in vars(importlib.import_module(name)).items():
            if member.startswith("test_"):
                value()

    def _run_script(self, code: str) -> None:
        """Run a block, and compare its output with the comments that show it."""
        with redirect_stdout(StringIO()) as output:
            exec(code, self.names)
        lines = output.getvalue().splitlines()
        for shown in SHOWN_OUTPUT.findall(code):
            start = shown.removesuffix("...")
            assert any(line.startswith(start) for line in lines), (shown, lines)

    def run_yaml(self, code: str) -> None:
        """Write a config that its first line names; parse any other block."""
        assert yaml.safe_load(code)
        if file := re.match(r"# (\w+\.yaml)\b", code):
            (self.folder / file.group(1)).write_text(code)

    def run_bash(self, code: str) -> None:
        """Run the commands of pl_fed; check that the scripts of others exist."""
        for words in split_commands(code):
            if words[:3] == ["python", "-m", "pl_fed"]:
                self._run_pl_fed([self._with_a_run(word) for word in words[3:]])
            elif words[0] == "python":
                check_script(words)
            else:
                assert words[0] in NOT_RUN, words

    def _with_a_run(self, word: str) -> str:
        """Return the argument with the newest run in place of the page's run."""

        def newest(match: re.Match[str]) -> str:
            return str(max(Path(match.group(1)).glob("*"), key=lambda run: run.stat().st_mtime))

        return RUN_FOLDER.sub(newest, word)

    def _run_pl_fed(self, arguments: list[str]) -> None:
        if {"--help", "--version", "--print_config"} & {*arguments}:
            with pytest.raises(SystemExit) as stopped:
                run_command(arguments)
            assert stopped.value.code in (0, None)
        elif arguments[0] == "study":
            if "/" in arguments[1] and "--dry_run" not in arguments:
                # a study of the repository, which takes long; tests check its configs
                read_states([word for word in arguments[1:] if word != "--report"])
                return
            status, output = run_study(arguments[1:], self.folder)
            assert status == 0, output
        elif arguments[0] in ("fit", "validate", "test", "predict"):
            short = ONE_ROUND if arguments[0] == "fit" else ONE_ROUND[2:]
            if "ddp" in arguments:  # tests/test_processes.py runs two processes
                self._run_pl_fed([*arguments, "--print_config"])
            else:
                if "configs/privacy.yaml" in arguments and short is ONE_ROUND:
                    short = [*short, "--federation.privacy.rounds", "2000"]  # quicker to calibrate
                main([*arguments, *short])
        else:
            run_command(arguments)


def read_states(arguments: list[str]) -> None:
    """Expand a study and its selection, and print the states of its cells; it is no process."""
    with redirect_stdout(StringIO()) as output:
        study_in_this_process([*arguments, "--status"])
    assert "missing" in output.getvalue()


def run_command(arguments: list[str]) -> None:
    """Run a command as ``python -m pl_fed`` does."""
    if not run_light_command(arguments):
        main(arguments)


def check_script(words: list[str]) -> None:
    """Check that a command's script or module is in the repository."""
    if words[1] != "-m":
        assert (ROOT / words[1]).is_file(), words
    elif words[2] != "venv":
        module = ROOT / words[2].replace(".", "/")
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), words


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    """A folder with small random data in the format of Fashion-MNIST."""
    folder = tmp_path_factory.mktemp("data")
    write_mnist(folder, "FashionMNIST")
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch, data_folder):
    """The current folder: empty, but with the repository's configs and experiments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PL_FED_DATA", str(data_folder))
    monkeypatch.setenv("WANDB_MODE", "disabled")  # tests/test_wandb.py has runs of W&B
    for name in ("configs", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.exhaustive] * (page.name in LONG))
        for page in PAGES
    ],
)
def test_code_of_a_page_runs(page, folder):
    if page.name == "pl_fed/privacy/README.md":
        pytest.importorskip("dp_accounting", reason="the extra pl_fed[privacy] is not installed")
    reader = Reader(folder)
    reader.run(page)
    if page.name == "pl_fed/exports/README.md":
        assert torch.equal(reader.names["x"], Digits().load().inputs), "as in the run"


@pytest.mark.slow
def test_quickstart_gives_the_table_of_the_readme(folder, capsys):
    main(["fit", "--config", "configs/quickstart.yaml", "--trainer.enable_progress_bar", "false"])
    output = [re.findall(r"\d\.\d{4}", line) for line in capsys.readouterr().out.splitlines()]
    table = README.text.split("<!-- quickstart -->")[1].split("<!-- /quickstart -->")[0]
    rows = [re.findall(r"\d\.\d{4}", line) for line in table.splitlines()]
    assert len([row for row in rows if row]) == 3
    assert all(any(row == numbers[:2] for numbers in output) for row in rows if row)


def public_classes(room, *bases):
    """The concrete classes of a room; an abstract one is the base of others."""
    members = [member for member in vars(room).values() if isinstance(member, type)]
    concrete = [member for member in members if not inspect.isabstract(member)]
    return {member for member in concrete if issubclass(member, bases) and member not in bases}


def test_numbers_of_shipped_classes_in_the_readme_are_true():
    base = (aggregators.Aggregator, aggregators.PreAggregator, attacks.Attack, clients.Client)
    counts = [
        len(public_classes(clients, base[3])),
        len(public_classes(aggregators, base[0]) - {aggregators.Chain}),
        len(public_classes(aggregators, base[1])),
        len(public_classes(attacks, base[2])),
    ]
    sentence = "{} algorithms, {} aggregators, {} pre-aggregators and {} attacks".format(*counts)
    assert sentence in README.text


def test_examples_of_the_readme_have_at_most_ten_lines():
    for _, code in README.blocks("python"):
        lines = [line for line in code.splitlines() if line and not line.startswith("#")]
        assert len(lines) <= 10, code


@pytest.mark.parametrize(
    ("room", "bases"),
    [
        (clients, [clients.Client]),
        (attacks, [attacks.Attack]),
        (aggregators, [aggregators.Aggregator, aggregators.PreAggregator]),
        (compressors, [compressors.Compressor]),
    ],
    ids=["clients", "attacks", "aggregators", "compressors"],
)
def test_page_of_a_room_names_all_its_classes(room, bases):
    text = (Path(room.__file__).parent / "README.md").read_text()
    names = {member.__name__ for member in public_classes(room, *bases)}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_page_of_the_algorithms_names_all_members_for_authors():
    text = Page(ROOT / "pl_fed" / "clients" / "README.md").text.replace("`self.", "`")
    named = set(re.findall(r"`(\w+)", text))
    serving = {
        *("objective", "mean_loss", "sample_losses", "refuse_batch_criterion"),
        *("averages_samples", "choose_task", "count_classes", "place", "sample_weights"),
        *("sends_uploads", "device", "check_other_weights", "mixes_samples"),
    }
    members = {name for name in vars(Client) if not name.startswith("_")} - serving
    assert members - named == set()
    assert {field.name for field in fields(Model) if field.name not in text} == set()
