"""Help, version and lists: without PyTorch, on one screen, and true to the parser."""

import inspect
import re
import subprocess
import sys
from importlib import import_module
from unittest.mock import Mock

import pytest
import yaml
from pages import ROOT

import pl_fed
from pl_fed.__main__ import main as run_program
from pl_fed.command import start, streams
from pl_fed.command.help_pages import WITH_A_PAGE, help_page
from pl_fed.command.listing import KINDS, PRE_AGGREGATORS, ROOMS, describe_config, print_list
from pl_fed.command.main import main
from pl_fed.command.messages import SUBCOMMANDS
from pl_fed.command.shipped_configs import find_configs
from pl_fed.partitioners import Dirichlet
from pl_fed.studies.spec import KEYS

CLASS_OF_AN_OPTION = {  # options of a class that the quickstart does not name
    "data.partitioner.OPTION": "data.partitioner",
    "data.skew": "data",
    "federation.adversary.attack": "federation.adversary",
}


@pytest.mark.parametrize("command", [None, *WITH_A_PAGE])
def test_help_page_fits_on_a_screen(command):
    lines = help_page(command, KINDS).splitlines()
    assert lines[0].startswith("usage: python -m pl_fed")
    assert len(lines) <= 40
    assert max(map(len, lines)) < 80


def test_overview_names_every_command_and_four_examples():
    page = help_page(None)
    for command in SUBCOMMANDS:
        assert re.search(rf"^  {command}  +\w", page, re.MULTILINE), command
    assert page.count("  python -m pl_fed ") == 4


@pytest.mark.slow
def test_help_page_names_existing_options(capsys):
    """A renamed option must change its page, too."""
    with pytest.raises(SystemExit):
        main(["fit", "--config", "quickstart", "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    pages = "".join(help_page(command, KINDS) for command in WITH_A_PAGE if command != "study")
    options = set(re.findall(r"^  --([\w.]+)", pages, re.MULTILINE)) - {"config", "help"}
    assert len(options) > 20
    for option in options - {"print_config", "model.help", "data.partitioner.help"}:
        node = config
        for name in option.removesuffix(".OPTION").split("."):
            node = node.get("init_args", node) if "class_path" in node else node
            assert name in node, option
            node = node[name]


def test_examples_of_help_pages_name_existing_files_options_and_keys():
    pages = {command: help_page(command, KINDS) for command in WITH_A_PAGE}
    named = re.findall(r"configs/[\w/]+\.yaml", "".join(pages.values()))
    assert named
    assert all((ROOT / name).is_file() for name in named), named
    (option,) = set(re.findall(r"Dirichlet --data\.partitioner\.(\w+)", pages["partition"]))
    assert option in inspect.signature(Dirichlet).parameters
    assert f"for example {option}\n" in pages["partition"]
    assert all(re.search(rf"\b{key}\b", pages["study"]) for key in (*KEYS, "extends"))
    assert re.search(r"engine.name NAME +auto \(a rule\), fastest \(a measurement\)", pages["fit"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROOMS)
def test_list_has_every_class_that_can_be_made(kind, capsys):
    """The list reads source files; here, the imported classes say the same."""
    print_list([kind])
    blocks = capsys.readouterr().out.split("\n\n")
    rooms = [ROOMS[kind], *([PRE_AGGREGATORS] if kind == "defences" else [])]
    assert len(blocks) == 2 * len(rooms)
    for room, lines, use in zip(rooms, blocks[::2], blocks[1::2], strict=True):
        check_list(room, lines.splitlines())
        assert use.startswith(f"Use one with {room.option}. Its options: fit --")


def check_list(room, lines):
    """Check that lines are about the classes of a room."""
    module = import_module(f"pl_fed.{room.name}")
    base_module = import_module("torch.nn") if room.name == "models" else module
    bases = tuple(getattr(base_module, name) for name in room.bases)
    expected = {
        name
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, bases)
        and not inspect.isabstract(value)
        and value not in bases
        and value.__module__.startswith(f"pl_fed.{room.name}.")
    }
    assert {line.split()[0] for line in lines} == expected
    assert all(len(line.split()) > 3 for line in lines)


def test_list_of_configs_has_their_comments(capsys):
    print_list(["configs"])
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[:-2])
    assert lines.keys() == find_configs().keys()
    assert lines["fedper"].startswith("FedPer (Arivazhagan et al., 2019): a shared body")
    assert not any("python" in text for text in lines.values()), "no command, such as lora's second"
    assert describe_config(find_configs()["backdoor"]).endswith("on top of any other config.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list"], "Expected one kind to list, of algorithms, attacks, "),
        (["list", "attacs"], "but got attacs (did you mean attacks?)"),
        (["lsit", "attacks"], "hint: did you mean python -m pl_fed list attacks?"),
    ],
)
def test_wrong_command_is_refused_in_two_lines(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        start.run_light_command(arguments)
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.startswith("error: Expected ")
    assert words in error


@pytest.mark.slow
def test_list_takes_other_names_of_a_kind(capsys):
    print_list(["aggregators"])
    by_other_name = capsys.readouterr().out
    print_list(["defences"])
    assert capsys.readouterr().out == by_other_name


def test_help_all_and_other_commands_are_left_to_the_parser():
    assert not start.run_light_command(["fit", "--help", "all"])
    assert not start.run_light_command(["export", "--help"])
    assert not start.run_light_command(["fit", "--config", "quickstart"])


def test_interrupt_of_the_imports_prints_no_traceback(monkeypatch, capsys):
    """They may take many seconds on a busy machine."""
    monkeypatch.setattr(streams, "open_standard_streams", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as stopped:
        run_program()
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "Stopped by Ctrl-C.\n"


LIGHT = """
import sys
from pl_fed.__main__ import main
for arguments in (["--help"], ["fit", "--help"], ["list", "data"], ["list", "configs"]):
    sys.argv = ["pl_fed", *arguments]
    try:
        main()
    except SystemExit as stopped:
        assert not stopped.code
sys.argv = ["pl_fed", "--version"]
main()
print({"torch", "lightning", "jsonargparse"} & set(sys.modules))
"""


@pytest.mark.slow
def test_light_commands_import_neither_torch_nor_lightning():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert done.stdout.endswith(f"pl_fed {pl_fed.__version__}\nset()\n")
    assert "usage: pl_fed fit " in done.stdout, "as the console script is called"
