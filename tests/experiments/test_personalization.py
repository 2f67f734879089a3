"""The boards of personalization: their studies build, and their page says what the results say."""

from pathlib import Path

import pytest
from covering_cells import choose_cells, settings_of
from further_cases import mark_others

from experiments.experiment import read_csv, write_csv
from experiments.personalization import page, results
from experiments.personalization.results import BOARDS, DEFAULTS, FINETUNING, LOCAL, TUNED, Results
from pl_fed.studies.cell_configs import check_config

FOLDER = Path(page.__file__).parent


def row(method, accuracy, seed, board="vehicle", tuning=TUNED, **numbers):
    return {
        "board": board,
        "tuning": tuning,
        "method": method,
        "seed": str(seed),
        "status": "done",
        "accuracy": str(accuracy),
        "worst10": str(accuracy - 0.1),
        "held_out": str(accuracy - 0.2),
        **numbers,
    }


def rows(shift=0.0, **options):
    """Ditto is 0.10 to 0.12 above finetuning, FedRep equal to it, and local training below both."""
    lines = []
    for seed in range(5):
        base = 0.7 + 0.01 * seed + shift
        better = base + 0.1 + 0.005 * seed
        lines += [row(LOCAL, base - 0.1, seed, **options), row(FINETUNING, base, seed, **options)]
        lines += [row("Ditto", better, seed, **options)]
        lines += [row("FedRep", base + 0.001 * (-1) ** seed, seed, **options)]
    return lines


@pytest.mark.parametrize("board", mark_others(BOARDS, "labels_small", "topics", "roles"))
@pytest.mark.slow
def test_each_board_builds_with_all_methods(board):
    cells = results.open_study(board).cells
    methods = list(dict.fromkeys(cell.values["method"] for cell in cells))
    assert {LOCAL, FINETUNING, *results.ONE_MODEL, *results.FAIR} <= {*methods}
    assert len(cells) == 5 * len(methods)
    chosen = choose_cells(cells, settings_of) if board == "vehicle" else cells[:1]
    for cell in chosen:
        check_config(cell.arguments)


@pytest.mark.slow
def test_defaults_are_the_same_study_without_tuning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a tuning in runs/ would change the cells
    tuned, plain = (results.open_study("vehicle", tuning) for tuning in (TUNED, DEFAULTS))
    assert plain.spec.tune is None
    assert plain.folder != tuned.folder
    assert [cell.change for cell in plain.cells] == [cell.change for cell in tuned.cells]


def test_methods_are_compared_with_a_baseline_by_paired_tests():
    found = Results(rows())
    assert found.methods_of("vehicle") == ["Ditto", "FedRep", FINETUNING, LOCAL]
    better, worse = page.list_better(found, "vehicle", FINETUNING, "accuracy")
    assert (better, worse) == (["Ditto"], [LOCAL])
    text = page.answer_beaten(found)
    assert "Ditto has the highest mean, 0.830" in text
    assert "finetuning has 0.720: 1 methods are better (Ditto), 1 are worse" in text


def test_ranks_are_means_over_boards_for_each_seed():
    lines = rows() + rows(board="writers")
    ranks = Results(lines).rank(["Ditto", FINETUNING, LOCAL])
    assert ranks.names == ("Ditto", FINETUNING, LOCAL)
    assert ranks.average_ranks.tolist() == [1.0, 2.0, 3.0]
    assert ranks.friedman.blocks == 5
    assert Results(rows()).rank(["Ditto", LOCAL]) is None


def test_a_diverged_run_has_an_accuracy_of_zero_and_no_spread():
    lines = [row("Ditto", 0.5, 0, std="0.1"), row("Ditto", 0.7, 1, std="0.1")]
    lines[1] |= {"status": "diverged", "accuracy": "", "std": ""}
    found = Results(lines)
    assert found.values("accuracy", "vehicle", "Ditto") == [0.5, 0.0]
    assert found.values("std", "vehicle", "Ditto") == []


def test_tuning_of_the_baseline_is_told_apart_from_the_gap():
    lines = rows() + rows(shift=-0.05, tuning=DEFAULTS)
    text = page.answer_tuning(Results(lines))
    assert "tuning adds +0.050 to finetuning" in text
    assert "+0.160 before the baseline is tuned, and +0.110 after" in text
    assert "| Ditto | +0.050 ± 0.000 |" in page.tabulate_tuning(Results(lines))


def write_run(folder, accuracies, samples, classes):
    folder.mkdir()
    clients = [
        {"client": str(c), "train_samples": str(n), "personal_accuracy": str(a), "held_out": "0"}
        for c, (a, n) in enumerate(zip(accuracies, samples))
    ]
    away = {"client": "9", "train_samples": "5", "personal_accuracy": "0", "held_out": "1"}
    write_csv(folder / "per_client.csv", [*clients, away])
    lines = [
        {"client": str(c), "class": str(k), "samples": str(n)}
        for c, counts in enumerate(classes)
        for k, n in enumerate(counts)
    ]
    write_csv(folder / "per_class.csv", lines)


def test_gains_are_those_of_training_clients_by_halves(tmp_path):
    samples, classes = [10, 40, 20, 30], [[5, 5], [4, 6], [10, 0], [9, 1]]
    write_run(tmp_path / "local", [0.5, 0.5, 0.5, 0.5], samples, classes)
    write_run(tmp_path / "run", [0.9, 0.4, 0.7, 0.5], samples, classes)
    gains = results.measure_gains(tmp_path / "run", tmp_path / "local")
    assert {name: float(value) for name, value in gains.items()} == pytest.approx(
        {
            "gain": 0.125,
            "gaining": 0.5,
            "losing": 0.25,
            "largest_loss": -0.1,
            "gain_small": 0.3,  # clients 0 and 2
            "gain_large": -0.05,
            "gain_few": 0.1,  # clients 2 and 3
            "gain_many": 0.15,
        }
    )


def test_the_page_has_all_parts_and_needs_results():
    text = page.make_page(Results(rows() + rows(board="writers")))
    for title in ("Who gains?", "New clients", "FedTilt and Ditto", "### Vehicle", "### Writers"):
        assert title in text
    with pytest.raises(ValueError, match="run a study, and give the name of its board"):
        page.make_page(Results([]))


@pytest.mark.skipif(not results.TABLE.is_file(), reason="no board has run")
@pytest.mark.slow
def test_the_committed_page_is_that_of_the_committed_results():
    text = page.make_page(Results(page.read_csv(results.TABLE)))
    assert (FOLDER / "table.md").read_text(encoding="utf-8") == text


def test_values_of_methods_tuned_earlier_stay(tmp_path):
    path = tmp_path / "tuned" / "vehicle.csv"
    results.add_tuned_values(path, [{"method": "Local", "chosen": "lr = 0.1"}])
    later = [
        {"method": "Local", "chosen": "nothing yet"},
        {"method": "Ditto", "chosen": "lr = 0.2"},
    ]
    results.add_tuned_values(path, later)
    assert {row["method"]: row["chosen"] for row in read_csv(path)} == {
        "Local": "lr = 0.1",
        "Ditto": "lr = 0.2",
    }
