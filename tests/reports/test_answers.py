"""Answers of a report: tables about the same clients, with exact numbers."""

import json

import numpy as np
import pytest
from run_folders import read_table, with_changes, write_run, write_table
from scipy.stats import spearmanr

import pl_fed
from pl_fed.reports.answers import find_answers
from pl_fed.reports.group import group_runs
from pl_fed.reports.run import find_runs, read_run
from pl_fed.reports.worst_clients import rank_correlation

ATTACK = {
    "federation.adversary.attack": {"class_path": "pl_fed.attacks.RandomLabels"},
    "federation.adversary.fraction": 0.25,
}
MEDIAN = {"federation.aggregator": {"class_path": "pl_fed.aggregators.Median"}}
LOCAL = {"model.class_path": "pl_fed.clients.Local"}


@pytest.fixture
def answer(tmp_path):
    """Return a function that writes runs and returns the rows of an answer."""

    def find(name, *runs):
        for number, (changes, options) in enumerate(runs):
            write_run(tmp_path / f"run{number}", with_changes(changes), **options)
        return find_again(name)

    def find_again(name):
        answers = find_answers(group_runs(find_runs([tmp_path])[0]))
        return next((answer.rows for answer in answers if answer.name == name), [])

    find.folder, find.again = tmp_path, find_again
    return find


def change_columns(folder, file="per_client.csv", **columns):
    rows = read_table(folder / file)
    for name, values in columns.items():
        rows = [row | {name: value} for row, value in zip(rows, values)]
    write_table(folder / file, rows)


def test_differences_are_paired_by_client_and_seed(answer):
    """Clients change places between groups: the means are equal, but not the clients."""
    rows = answer(
        "differences",
        ({}, {"accuracy": (0.5, 0.7, 0.9, 0.1)}),
        ({"seed_everything": 1}, {"accuracy": (0.0, 0.0, 0.0, 0.0)}),
        ({"model.init_args.lam": 2.0}, {"accuracy": (0.7, 0.9, 0.9, 0.5)}),
    )
    (row,) = rows
    assert row["group"] == 2
    assert row["difference"] == pytest.approx(0.2), "seed 1 has no counterpart"
    half = 1.96 * np.std([0.2, 0.2, 0.0, 0.4], ddof=1) / 2
    assert row["interval"] == f"{0.2 - half:+.3f} to {0.2 + half:+.3f}"
    assert (row["better"], row["worse"]) == ("3 of 4", "0 of 4")


def test_clients_of_a_repeated_seed_are_paired_once(answer):
    """Repeated runs on either side change neither the interval nor the counts."""
    first = ({}, {"accuracy": (0.5, 0.7, 0.9, 0.1)})
    second = ({"model.init_args.lam": 2.0}, {"accuracy": (0.7, 0.9, 0.9, 0.5)})
    rows = answer("differences", first, first, second, first, second)
    half = 1.96 * np.std([0.2, 0.2, 0.0, 0.4], ddof=1) / 2
    assert rows[0]["interval"] == f"{0.2 - half:+.3f} to {0.2 + half:+.3f}"
    assert (rows[0]["better"], rows[0]["worse"]) == ("3 of 4", "0 of 4")


def test_own_models_of_a_repeated_seed_are_counted_once(answer):
    run = ({}, {"accuracy": (0.5, 0.5, 0.5, 0.5)})
    answer("own_model", run, run)
    for name in ("run0", "run1"):
        change_columns(answer.folder / name, personal_accuracy=[0.1, 0.6, 0.8, 0.9])
    (row,) = answer.again("own_model")
    assert row["worse off"] == "1 of 4"


def test_runs_on_other_data_are_not_paired(answer):
    assert answer("differences", ({}, {}), ({"data.num_clients": 9}, {})) == []


def test_losses_favour_smaller_results(answer):
    answer("differences", ({}, {}), ({"model.init_args.lam": 2.0}, {}))
    for name, losses in (("run0", [1, 2, 3, 4]), ("run1", [2, 1, 1, 4])):
        rows = [
            {k: v for k, v in row.items() if "accuracy" not in k}
            for row in read_table(answer.folder / name / "metrics.csv")
        ]
        write_table(answer.folder / name / "metrics.csv", rows)
        change_columns(answer.folder / name, personal_loss=losses)
    (row,) = answer.again("differences")
    assert row["difference"] == -0.5
    assert (row["better"], row["worse"]) == ("2 of 4", "1 of 4")


def test_equality_of_clients_is_a_mean_over_seeds(answer):
    rows = answer(
        "equality",
        ({}, {"accuracy": (0.9, 0.8, 0.5, 0.7, 0.0), "byzantine": [4]}),
        ({"seed_everything": 1}, {"accuracy": (0.5, 0.5, 0.5, 0.5, 0.0), "byzantine": [4]}),
    )
    assert [row["model"] for row in rows] == ["personal", "global"]
    row = rows[0]
    assert row["gini"] == pytest.approx(0.1120689655 / 2)
    assert row["entropy / ln n"] == pytest.approx((0.9843275675 + 1) / 2)
    assert (row["worst 20 %"], row["median"]) == (0.5, pytest.approx((0.75 + 0.5) / 2))
    assert row["loss gap"] == pytest.approx(0.2)


def test_runs_with_other_statistics_are_of_one_group(answer):
    rows = answer(
        "equality",
        ({"federation.statistics": None}, {}),
        ({"seed_everything": 1, "federation.statistics": ["gini"]}, {}),
    )
    assert {row["group"] for row in rows} == {1}


def test_inequality_of_negative_results_is_left_out(answer):
    (row, _) = answer("equality", ({}, {"accuracy": (0.5, -0.25, 0.5, 0.5)}))
    assert (row["gini"], row["cv"], row["entropy / ln n"]) == (None, None, None)
    assert (row["gap"], row["worst 1 %"]) == (0.75, -0.25)


def test_equality_leaves_out_clients_whose_metric_is_undefined(answer):
    answer("equality", ({}, {"accuracy": (0.5, 0.25, 0.75, 0.5)}))
    folder = answer.folder / "run0"
    change_columns(folder, personal_accuracy=[0.5, 0.25, "nan", 0.75])
    row = answer.again("equality")[0]
    assert (row["worst 1 %"], row["median"], row["gap"]) == (0.25, 0.5, 0.5)
    rows = [
        {k: v for k, v in row.items() if k != "test/personal/accuracy"}
        for row in read_table(folder / "metrics.csv")
    ]
    write_table(folder / "metrics.csv", rows)
    assert answer.again("equality")[0]["gap"] is None, "the client's model has diverged"


def test_clients_worse_off_with_their_own_model(answer):
    answer("own_model", ({}, {"accuracy": (0.5, 0.5, 0.5, 0.5), "byzantine": [3]}))
    change_columns(
        answer.folder / "run0", personal_accuracy=[0.1, 0.6, 0.8, 0.0], rounds=[0, 2, 3, 0]
    )
    (row,) = answer.again("own_model")
    assert row["worse off"] == "1 of 3"
    assert row["their mean loss"] == pytest.approx(0.4)
    assert row["mean gain of the others"] == pytest.approx(0.2)
    assert row["never took part"] == 1


def test_losses_under_an_attack_are_over_the_same_benign_clients(answer):
    rows = answer(
        "attacked",
        ({}, {"accuracy": (0.9, 0.8, 0.7, 0.6)}),
        (ATTACK, {"accuracy": (0.0, 0.7, 0.68, 0.65), "byzantine": [0]}),
    )
    assert [row["model"] for row in rows] == ["personal", "global"]
    row = rows[0]
    assert row["difference"] == pytest.approx((-0.1 - 0.02 + 0.05) / 3)
    assert row["lose more than 0.05"] == 1
    assert row["largest loss"] == pytest.approx(0.1)
    assert row["worst 10 %"] == "0.600 → 0.650"


def test_defence_is_compared_with_the_plain_mean(answer):
    rows = answer(
        "defences",
        ({}, {"accuracy": (0.9,) * 4}),
        (ATTACK, {"accuracy": (0.5,) * 4, "byzantine": [0]}),
        (MEDIAN, {"accuracy": (0.8,) * 4}),
        ({**MEDIAN, **ATTACK}, {"accuracy": (0.7,) * 4, "byzantine": [0]}),
    )
    costs = [(row["cost without an attack"], row["gain under the attack"]) for row in rows]
    assert costs == [(pytest.approx(0.1), None), (None, pytest.approx(0.2))]


def test_a_mean_that_is_named_is_the_plain_mean(answer):
    mean = {"class_path": "pl_fed.aggregators.Mean", "init_args": {"weighting": "uniform"}}
    rows = answer(
        "defences",
        ({"federation.aggregator": mean}, {"accuracy": (0.9,) * 4}),
        (MEDIAN, {"accuracy": (0.8,) * 4}),
    )
    assert [row["cost without an attack"] for row in rows] == [pytest.approx(0.1)]


def test_clients_whose_models_diverge_are_worse_off(answer):
    answer("differences", ({}, {"accuracy": (0.5, 0.7)}), (MEDIAN, {"accuracy": (0.6, 0.8)}))
    change_columns(answer.folder / "run1", personal_accuracy=[0.6, "nan"])
    (row,) = answer.again("differences")
    assert (row["better"], row["worse"]) == ("1 of 2", "1 of 2")
    assert row["difference"] is row["interval"] is None


def test_level_is_worse_than_the_best_value_also_below_zero(answer):
    answer("communication", ({}, {}))
    rows = read_table(answer.folder / "run0" / "metrics.csv")
    values = iter([0.5, -1.0, -2.0, *[-2.0] * 99])
    for row in rows:
        if row.get("val/personal/accuracy"):
            row["val/personal/accuracy"] = next(values)
    write_table(answer.folder / "run0" / "metrics.csv", rows)
    (row, *_) = answer.again("communication")
    assert row["level of accuracy"] == pytest.approx(0.475), "larger values are better"


def test_other_groups_are_compared_with_local_training(answer):
    rows = answer(
        "local",
        ({}, {"accuracy": (0.9, 0.4)}),
        (LOCAL, {"accuracy": (0.5, 0.5), "models": ("personal",)}),
    )
    (row,) = rows
    assert (row["group"], row["better"], row["worse"]) == (1, "1 of 2", "1 of 2")


def test_results_correlate_with_properties_of_clients(answer):
    accuracies = (0.9, 0.8, 0.7, 0.6)
    answer("worst_clients", ({}, {"accuracy": accuracies}))
    change_columns(
        answer.folder / "run0", train_samples=[4, 3, 2, 1], rounds=[1, 2, 3, 4],
        personal_accuracy=accuracies,
    )  # fmt: skip
    (row,) = answer.again("worst_clients")
    assert row["training samples"] == pytest.approx(1)
    assert row["rounds"] == pytest.approx(-1)
    assert row["classes"] is None, "all clients have both classes"


def test_rank_correlation_equals_that_of_scipy():
    draw = np.random.default_rng(0)
    for _ in range(20):
        first, second = draw.integers(0, 6, (2, 30)).astype(float)
        expected = spearmanr(first, second).statistic
        assert rank_correlation(first, second) == pytest.approx(expected, abs=1e-12)
    assert np.isnan(rank_correlation(np.ones(3), np.arange(3.0)))


def test_rounds_and_bytes_until_a_level(answer):
    """Validations are in rounds 1 and 3, with 0.2 and 0.4 of the mean accuracy."""
    answer("communication", ({}, {"accuracy": (1.0, 1.0)}), (MEDIAN, {"accuracy": (0.5, 0.5)}))
    summary = {"counts": {"upload_bytes": 1_000_000}}
    (answer.folder / "run0" / "summary.json").write_text(json.dumps(summary))
    first, second, *_ = answer.again("communication")
    assert first["level of accuracy"] == pytest.approx(0.38)
    assert (first["rounds"], first["uploads"], first["MB uploaded"]) == (4, 12, 12.0)
    assert second["rounds"] == "not reached"


def test_uploads_are_those_of_a_run_that_reached_the_level(answer):
    """The first run stopped after a round. The level is reached in round 3, the fourth."""
    stopped = {"rounds": 1, "tested": False}
    answer("communication", ({}, stopped), ({"seed_everything": 1}, {}))
    (row, *_) = answer.again("communication")
    assert (row["rounds"], row["uploads"]) == (4, 12)


def test_megabytes_until_a_level_are_sums_over_rounds(answer):
    """The level is reached in round 3, the fourth."""
    answer("communication", ({}, {"accuracy": (1.0, 1.0)}), (MEDIAN, {"accuracy": (0.5, 0.5)}))
    for number in range(2):
        rows = read_table(answer.folder / f"run{number}" / "metrics.csv")
        for row in rows:
            if row.get("train/cohort"):
                size = 1e6 * (1 + int(row["round"]))
                row |= {"train/upload_bytes": size, "train/download_bytes": 10 * size}
        write_table(answer.folder / f"run{number}" / "metrics.csv", rows)
    first, *_ = answer.again("communication")
    assert (first["MB uploaded"], first["MB downloaded"]) == (1 + 2 + 3 + 4, 100)


def test_local_training_uploads_nothing_and_a_model_has_one_row(answer):
    """All groups have a global model only."""
    answer("communication", ({}, {}), (LOCAL, {}))
    for number, upload_bytes in enumerate((1000, 0)):
        summary = {"counts": {"upload_bytes": upload_bytes}}
        (answer.folder / f"run{number}" / "summary.json").write_text(json.dumps(summary))
        rows = read_table(answer.folder / f"run{number}" / "metrics.csv")
        rows = [{k: v for k, v in row.items() if "personal" not in k} for row in rows]
        write_table(answer.folder / f"run{number}" / "metrics.csv", rows)
    first, second = answer.again("communication")
    assert first["uploads"] > 0
    assert (second["uploads"], second["MB uploaded"]) == (0, 0.0)


def test_gap_of_groups_that_is_undefined_for_a_seed_has_no_mean(answer):
    name = "global/group/equalized_odds"
    for seed, gap in ((0, 0.25), (1, None)):
        folder = write_run(answer.folder / f"{seed}", with_changes({"seed_everything": seed}))
        *rows, tested = read_table(folder / "metrics.csv")
        tested = {**tested, f"test/{name}": "" if gap is None else gap}
        tested["test/global/group/accuracy_gap"] = seed
        write_table(folder / "metrics.csv", [*rows, tested])
        (folder / "summary.json").write_text(json.dumps({"metrics": {"test": {name: gap}}}))
    (row,) = answer.again("group_gaps")
    assert (row["equalized odds gap"], row["accuracy gap"]) == (None, 0.5)


def test_gaps_between_values_of_a_column_of_text(answer):
    answer("attributes", ({}, {"accuracy": (0.9, 0.7, 0.4, 0.0), "byzantine": [3]}))
    change_columns(answer.folder / "run0", region=["north", "south", "south", "north"])
    rows = answer.again("attributes")
    values = [(row["region"], row["clients"], row["gap to the best"]) for row in rows]
    assert values == [("north", 1, 0.0), ("south", 2, pytest.approx(0.35))]
    assert read_run(answer.folder / "run0").damage == (), "text is no damage"
    region = pl_fed.read_run(answer.folder / "run0").clients["region"]
    assert region.tolist() == ["north", "south", "south", "north"]


def test_single_run_without_an_attack_has_few_answers(answer):
    answer("differences", ({}, {}))
    names = [a.name for a in find_answers(group_runs(find_runs([answer.folder])[0]))]
    assert names == ["equality", "own_model", "communication"]


def test_metrics_over_trained_clients_default_to_those_over_all(tmp_path):
    """If all clients took part, the statistics are equal and logged once."""
    folder = write_run(tmp_path / "run")
    assert read_run(folder).final("test/personal/accuracy_trained") is None, "unknown participation"
    change_columns(folder, rounds=[1, 1, 2, 2])
    run = read_run(folder)
    assert run.final("test/personal/accuracy_trained_std") == run.final(
        "test/personal/accuracy_std"
    )
    rows = read_table(folder / "metrics.csv")
    write_table(folder / "metrics.csv", [*rows[:-1], rows[-1] | {"test/held_out/global/loss": 1}])
    held_out = read_run(folder)
    assert held_out.final("test/held_out/global/loss") == 1
    assert held_out.final("test/held_out/global/loss_trained") is None, "they never train"
    change_columns(folder, rounds=[1, 1, 0, 2])
    assert read_run(folder).final("test/personal/accuracy_trained") is None


def test_undefined_metrics_are_undefined_over_trained_clients(tmp_path):
    """Else the mean over trained clients would be that of the other seeds."""
    folder = write_run(tmp_path / "run")
    change_columns(folder, rounds=[1, 1, 2, 2])
    summary = {"metrics": {"test": {"personal/accuracy": None}}}
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = [
        {k: v for k, v in row.items() if k != "test/personal/accuracy"}
        for row in read_table(folder / "metrics.csv")
    ]
    write_table(folder / "metrics.csv", rows)
    assert read_run(folder).is_undefined("test/personal/accuracy_trained")
