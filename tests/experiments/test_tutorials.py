"""The tutorials print what their page shows."""

import csv
import itertools
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
from further_cases import mark_others
from study_processes import fork_workers

import pl_fed
from experiments.tutorials import compare_under_attack, own_algorithm

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "experiments" / "tutorials" / "README.md").read_text()
NUMBER = re.compile(r"\d\.\d\d")
ROUNDING = 0.035  # on other machines: of one of 30 samples in the worst 10 %


def read_output(name):
    """Return the output of a tutorial that its page shows."""
    shown = re.search(rf"<!-- {name} -->(.*)<!-- /{name} -->", PAGE, flags=re.DOTALL)[1]
    return re.sub(r"```\w*", "", shown)


def read_numbers(text):
    return [float(number) for number in NUMBER.findall(text)]


def read_comparison():
    """Return the numbers of the comparison's page, by algorithm and condition."""
    pairs = itertools.product(compare_under_attack.ALGORITHMS, compare_under_attack.CONDITIONS)
    numbers = read_numbers(read_output("compare_under_attack"))
    return dict(zip(pairs, zip(numbers[::2], numbers[1::2]), strict=True))


@pytest.fixture
def lightning_logs():
    """Restores the level of Lightning's logger, which a tutorial changes."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.slow
def test_own_algorithm_prints_the_output_of_its_page(capsys, lightning_logs):
    own_algorithm.main()
    printed, shown = capsys.readouterr().out, read_output("own_algorithm")
    assert NUMBER.sub("x", printed).strip() == NUMBER.sub("x", shown).strip()
    assert read_numbers(printed) == pytest.approx(read_numbers(shown), abs=ROUNDING)


@pytest.mark.slow
def test_comparison_prints_the_table_of_its_page(capsys, monkeypatch, lightning_logs):
    shown, table = read_output("compare_under_attack"), read_comparison()
    monkeypatch.setattr(compare_under_attack, "compare", lambda: table)
    compare_under_attack.main()
    assert capsys.readouterr().out.strip() == shown.strip()


# four of the twelve runs have all algorithms and all conditions
COMPARED = [*zip(("Ditto", "FedRep", "FedAvg", "FedAvg"), compare_under_attack.CONDITIONS)]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "condition"), mark_others(COMPARED, COMPARED[1]))
def test_comparison_gives_the_numbers_of_its_page(algorithm, condition, lightning_logs):
    expected = read_comparison()[algorithm, condition]
    outcome = compare_under_attack.run(algorithm, condition, rounds=30)
    assert outcome == pytest.approx(expected, abs=ROUNDING)


STUDY = ROOT / "experiments" / "tutorials" / "study.yaml"


@pytest.mark.slow
def test_study_reports_the_table_of_its_page(tmp_path):
    """From the results of its runs, which stand beside it."""
    study = pl_fed.Study.from_file(STUDY, folder=tmp_path / "tutorial")
    study.folder.mkdir()
    shutil.copy(STUDY.with_suffix(".csv"), study.folder / "results.csv")
    tables = study.report().parent / "tables"
    latex = (tables / "test_personal_accuracy_worst10.tex").read_text()
    shown = re.search(r"<!-- study -->\n\n```latex\n(.*)\n```\n\n<!-- /study -->", PAGE, re.DOTALL)[
        1
    ]
    assert len(study.cells) == 24
    assert shown in latex


@pytest.mark.slow
def test_study_gives_its_results(tmp_path, monkeypatch):
    """A cell of the 24, up to the rounding of other machines."""
    fork_workers(monkeypatch)
    with STUDY.with_suffix(".csv").open(newline="") as file:
        shown = next(row for row in csv.DictReader(file) if row["attack"] == "signs")
    only = [f"{axis}={shown[axis]}" for axis in ("algorithm", "attack", "aggregator", "seed")]
    study = pl_fed.Study.from_file(STUDY, folder=tmp_path / "tutorial")
    (row,) = (row for row in study.run(workers=1, only=only) if row["status"] == "done")
    for name in ("test/global/accuracy", "test/global/accuracy_worst10"):
        assert row[name] == pytest.approx(float(shown[name]), abs=ROUNDING)


def test_own_algorithm_passes_its_check():
    own_algorithm.check()


def test_memory_of_zero_remembers_the_last_broadcast():
    """The centre of the pull is then the one of Ditto."""
    client = own_algorithm.Remembering(torch.nn.Linear(1, 2), memory=0.0)
    client_round = client.new_round(clients=2, samples=3)
    client_round.states["remembered"] += 5.0
    client.run_begin(client_round)
    remembered = client_round.states["remembered"]
    torch.testing.assert_close(remembered, client_round.broadcast.parameters.expand(2, 4))
