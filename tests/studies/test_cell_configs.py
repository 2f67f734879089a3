"""Checks of configs share a parser, and give what a parser of their own gives."""

import pytest

from pl_fed.studies.cell_configs import CheckCLI, InvalidCellError, check_config

BASE = ["--config=configs/quickstart.yaml", "--trainer.logger=false"]
DITTO = [*BASE, "--model=pl_fed.clients.Ditto", "--model.lam=0.3"]
FEDAVG = [*BASE, "--model=pl_fed.clients.FedAvg", "--model.optimizer=Adam"]
LOGGED = ["--config=configs/quickstart.yaml"]
UNKNOWN = [*BASE, "--modle=3"]
WRONG = [*FEDAVG, "--data.normalize=null"]


def outcome(words, monkeypatch=None):
    if monkeypatch is not None:
        monkeypatch.setattr(CheckCLI, "_shared_parsers", {})
    try:
        return check_config(words).complete_config
    except InvalidCellError as error:
        return str(error)


@pytest.mark.slow
def test_a_shared_parser_gives_what_a_new_one_gives(monkeypatch):
    order = [DITTO, UNKNOWN, FEDAVG, WRONG, LOGGED, DITTO, FEDAVG, LOGGED]
    shared = [outcome(words) for words in order]
    separate = {tuple(words): outcome(words, monkeypatch) for words in order[:5]}
    assert shared == [separate[tuple(words)] for words in order]
    assert shared[0] == shared[5] != shared[2] == shared[6]
    assert "did you mean model" in shared[1]
    assert "`data.normalize`" in shared[3]
    assert shared[4]["trainer"]["logger"] is not False


@pytest.mark.parametrize("words", [["--trainer.devices=2"], ["--trainer.strategy=ddp"]])
def test_several_processes_are_refused(words):
    with pytest.raises(
        InvalidCellError, match=r"^Expected argument `trainer\.devices` of a study's"
    ):
        check_config([*BASE, *words, "--trainer.accelerator=cpu"])
