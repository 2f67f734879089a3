"""The command line builds the parser of its subcommand only."""

import pytest
import torch
from lightning.pytorch.cli import LightningArgumentParser

from pl_fed.command.export import ExportCLI
from pl_fed.command.fit import FederatedCLI
from pl_fed.command.parser import RefusalError
from pl_fed.command.sections import SectionsCLI
from pl_fed.rounds.identity import CHECKPOINT_FORMAT

SUBCOMMANDS = ["fit", "validate", "test", "predict"]


@pytest.fixture
def parsers(monkeypatch):
    """The parsers that the command line builds, in this order."""
    parsers = []
    add_arguments = SectionsCLI.add_arguments_to_parser

    def record_parser(cli, parser):
        parsers.append(parser)
        add_arguments(cli, parser)

    monkeypatch.setattr(SectionsCLI, "_shared_parsers", {})
    monkeypatch.setattr(SectionsCLI, "add_arguments_to_parser", record_parser)
    return parsers


@pytest.mark.slow
@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_command_line_builds_only_the_parser_of_its_subcommand(parsers, subcommand):
    with pytest.raises(SystemExit):
        FederatedCLI([subcommand, "--help"])
    (parser,) = parsers
    assert parser.subcommand == subcommand


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--help"], ["fot"], ["--config", "fit.yaml"]])
def test_command_line_without_a_subcommand_knows_all_of_them(parsers, capsys, arguments):
    with pytest.raises(SystemExit):
        FederatedCLI(arguments)
    assert len(parsers) == 4
    output = capsys.readouterr()
    if "--config" not in arguments:
        for subcommand in SUBCOMMANDS:
            assert subcommand in output.out + output.err


@pytest.mark.slow
def test_export_builds_one_parser(parsers, tmp_path):
    (tmp_path / "config.yaml").write_text("{}")
    torch.save({"federation": {"format": CHECKPOINT_FORMAT}}, tmp_path / "last.ckpt")
    with pytest.raises(SystemExit):  # the config has no model
        ExportCLI(["--ckpt", str(tmp_path / "last.ckpt"), "--client", "1"])
    assert len(parsers) == 1


@pytest.mark.slow
def test_later_command_lines_share_the_parser_and_get_what_a_new_one_gives(
    parsers, monkeypatch, capsys
):
    def parse(*words):
        with pytest.raises(SystemExit):
            FederatedCLI(["fit", "--config=quickstart", *words, "--print_config"])
        return capsys.readouterr()

    first = ("--model=Ditto", "--model.lam=0.3", "--trainer.logger=false")
    second = ("--model=FedAvg", "--model.optimizer=Adam", "--federation.sampler.cohort_size=2")
    outputs = [parse(*words) for words in (first, ["--modle=3"], second, first)]
    assert len(parsers) == 1
    assert "did you mean model" in outputs[1].err
    assert outputs[0] == outputs[3] != outputs[2]
    monkeypatch.setattr(SectionsCLI, "_shared_parsers", {})
    assert parse(*second) == outputs[2]


@pytest.mark.slow
def test_refused_request_to_print_is_forgotten(parsers):
    for words in (["--print_config"], []):
        with pytest.raises(SystemExit):
            FederatedCLI(["fit", "--config=quickstart", *words, "--modle=3"])
        (shared,) = SectionsCLI._shared_parsers.values()
        assert hasattr(shared["parser"], "print_config") == bool(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["fit", "--config=quickstart", "--model=FedAvg", "--model.optimizer=Adam"],
        ["fit", "--config=fashion_mnist", "--config=ditto", "--config=label_poisoning"],
        ["validate", "--config=quickstart", "--federation.engine=stacked", "--weights_only=true"],
    ],
)
def test_parser_of_the_subcommand_returns_what_that_of_all_subcommands_does(monkeypatch, words):
    pairs = []

    def parse_twice(cli, parser, arguments):
        pairs.extend([parser.parse_args(arguments), parse_args(parser, arguments)])
        raise RefusalError

    parse_args = LightningArgumentParser.parse_args
    monkeypatch.setattr(SectionsCLI, "parse_arguments", parse_twice)
    with pytest.raises(RefusalError):
        FederatedCLI(words)
    config, expected = pairs
    assert repr(config) == repr(expected)
