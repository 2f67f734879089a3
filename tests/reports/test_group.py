"""Groups of runs that differ only in their seeds."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import yaml
from run_folders import CONFIG, with_changes, write_run

from pl_fed.reports import page, tables
from pl_fed.reports.group import (
    group_runs,
    is_higher_better,
    is_lower_better,
    list_models,
    main_metric,
)
from pl_fed.reports.run import find_runs


def group_written_runs(tmp_path, *runs):
    for number, (changes, options) in enumerate(runs):
        write_run(tmp_path / f"run{number}", with_changes(changes), **options)
    return group_runs(find_runs([tmp_path])[0])


def test_run_resumed_with_another_config_is_no_seed_of_its_group(tmp_path):
    changes = {"model.init_args.lam": 1.0}
    group_written_runs(tmp_path, (changes, {}), ({**changes, "seed_everything": 1}, {}))
    (tmp_path / "run1" / "config_to_round_2.yaml").write_text(yaml.safe_dump(CONFIG))
    groups = group_runs(find_runs([tmp_path])[0])
    assert [group.seeds for group in groups] == ["1 seed", "1 seed"]
    assert groups[1].label.endswith(" (from round 2 on)")


def test_runs_that_differ_in_seeds_form_one_group(tmp_path):
    first, other = group_written_runs(
        tmp_path,
        ({"seed_everything": 0}, {"accuracy": (0.2, 0.4)}),
        ({"model.init_args.lam": 1.0}, {"accuracy": (0.5,)}),
        ({"seed_everything": 1}, {"accuracy": (0.5, 0.7)}),
    )
    assert (first.number, first.label, first.seeds) == (1, "Ditto, lam=0.1", "2 seeds")
    assert (other.number, other.label, other.seeds) == (2, "Ditto, lam=1", "1 seed")
    final = first.final("test/global/accuracy")
    assert (final.mean, final.low, final.high) == pytest.approx((0.45, 0.3, 0.6))
    assert final.std == pytest.approx(0.3 / math.sqrt(2)), "of a sample"
    assert str(final) == "0.4500 ± 0.2121"
    assert str(other.final("test/global/accuracy")) == "0.5000"
    assert first.final("test/global/nothing") is None
    curve = first.curve("val/global/accuracy")
    assert curve.rounds == [1, 3]
    assert curve.mean == pytest.approx([0.09, 0.18])
    assert curve.low == pytest.approx([0.06, 0.12])
    assert curve.high == pytest.approx([0.12, 0.24])


def test_curve_counts_the_runs_of_each_round(tmp_path):
    (group,) = group_written_runs(
        tmp_path,
        ({"seed_everything": 0}, {"rounds": 6, "tested": False}),
        ({"seed_everything": 1}, {"rounds": 3}),
    )
    curve = group.curve("train/loss")
    assert curve.rounds == list(range(6))
    assert curve.runs == [2, 2, 2, 1, 1, 1]
    assert [run.name for run in group.tested_runs] == ["run1"]
    assert group.final("test/global/accuracy").std is None


def test_repeated_seed_counts_once(tmp_path):
    (group,) = group_written_runs(tmp_path, *[({"seed_everything": 1}, {}) for _ in range(2)])
    assert group.seeds == "2 runs of 1 seed"


def test_runs_without_configs_form_no_group(tmp_path):
    for name in "ab":
        (write_run(tmp_path / name) / "config.yaml").unlink()
    write_run(tmp_path / "c", CONFIG)
    assert [group.label for group in group_runs(find_runs([tmp_path])[0])] == ["a", "b", "Ditto"]


def test_infinite_values_are_left_out_of_curves(tmp_path):
    (group,) = group_written_runs(tmp_path, ({}, {"extra": {"train/loss": float("inf")}}))
    assert group.curve("train/loss").rounds == []


def test_models_and_main_metric_of_groups(tmp_path):
    groups = group_written_runs(
        tmp_path,
        ({}, {"models": ("global",)}),
        ({"data.num_clients": 9}, {"models": ("hybrid", "global")}),
    )
    assert list_models(groups, "test") == ["global", "hybrid"]
    assert main_metric(groups, "test") == "accuracy"
    assert main_metric(groups[:0], "test") == "loss"


def test_runs_of_one_seed_are_no_independent_runs(tmp_path):
    copies = [({"seed_everything": 0}, {"accuracy": (0.2, 0.4)})] * 3
    other = ({"seed_everything": 1}, {"accuracy": (0.5, 0.7)})
    (group,) = group_written_runs(tmp_path, *copies, other)
    final = group.final("test/global/accuracy")
    assert (final.mean, final.runs) == (pytest.approx(0.45), 2)
    assert final.std == pytest.approx(0.3 / math.sqrt(2))


def test_summary_has_the_direction_of_a_metric(tmp_path):
    """The worst and best clients are equal, so that only the summary knows."""
    write_run(tmp_path / "a", extra={"test/global/ape_worst10": 1.0, "test/global/ape_best10": 1.0})
    (run,) = find_runs([tmp_path])[0]
    assert is_higher_better([run], "ape") is None
    for known in (True, False):
        told = replace(run, summary={"higher_is_better": {"ape": known, "other": None}})
        assert is_higher_better([run, told], "ape") is known
        assert is_lower_better([run, told], "ape") is not known
        assert is_higher_better([told], "other") is None


def test_metric_of_unknown_direction_has_no_best_group(tmp_path):
    for seed, gain in itertools.product((0, 1), (0.0, 1.0)):
        folder = tmp_path / f"{seed}{gain}"
        changes = {"seed_everything": seed, "model.init_args.lam": gain}
        write_run(folder, with_changes(changes), extra={"test/global/ape": gain})
    groups = group_runs(find_runs([tmp_path])[0])
    assert tables._best_group(groups, "global", "ape") is None
    for group in groups:
        for run in group.runs:
            run.summary["higher_is_better"] = {"ape": False}
    assert tables._best_group(groups, "global", "ape") == groups[0].number


def test_direction_of_a_statistic_is_that_of_its_metric(tmp_path):
    """A metric with a longer name than the accuracy is another metric."""
    for seed, drop in itertools.product((0, 1), (0.0, 1.0)):
        changes = {"seed_everything": seed, "model.init_args.lam": drop}
        names = ("accuracy_drop_worst10", "f1_score_trained", "f1_score_std", "accuracy_own")
        extra = {f"test/global/{name}": drop for name in names}
        write_run(tmp_path / f"{seed}{drop}", with_changes(changes), extra=extra)
    groups = group_runs(find_runs([tmp_path])[0])
    low, high = (group.number for group in groups)
    for group in groups:
        for run in group.runs:
            run.summary["higher_is_better"] = {"accuracy_drop": False, "f1_score": True}
    best = [tables._best_group(groups, "global", name) for name in names]
    assert best == [low, high, low, None]


def test_diverged_run_is_a_result(tmp_path):
    write_run(tmp_path / "a", tested=False, rounds=2)
    write_run(tmp_path / "b", tested=False)
    (tmp_path / "a" / "summary.json").write_text('{"diverged": "Expected finite losses"}')
    (tmp_path / "b" / "summary.json").write_text('{"diverged": "Expected finite losses"}')
    (tmp_path / "b" / "metrics.csv").unlink()
    runs, skipped = find_runs([tmp_path / "a", tmp_path / "b"])
    assert skipped == []
    assert [run.is_diverged and run.is_finished for run in runs] == [True, True]
    assert [run.num_rounds for run in runs] == [2, 0]
    (group,) = group_runs(runs)
    assert tables.describe_run(group, runs[1])["state"] == "diverged"
    assert "Diverged runs (NaN or infinity), without a test: a, b." in page._notes([group], [])


def test_curves_of_a_repeated_seed_count_once(tmp_path):
    copies = [({"seed_everything": 0}, {"accuracy": (0.2, 0.4)})] * 3
    other = ({"seed_everything": 1}, {"accuracy": (0.5, 0.7)})
    (group,) = group_written_runs(tmp_path, *copies, other)
    curve = group.curve("val/global/accuracy")
    assert curve.mean == pytest.approx([0.09, 0.18]), "as without the two copies"
    assert curve.runs == [2, 2]
    assert group.has_repeated_seeds
    assert [run.name for run in group.first_of_seeds(group.runs)] == ["run0", "run3"]


def test_group_with_an_undefined_result_has_no_mean(tmp_path):
    """The mean of the other seeds would make it look better."""
    changes = ({"seed_everything": seed} for seed in (0, 1))
    (group,) = group_written_runs(tmp_path, *((change, {}) for change in changes))
    assert group.final("test/personal/accuracy").mean == pytest.approx(0.625)
    summary = {"metrics": {"test": {"personal/accuracy": None}}}
    (tmp_path / "run1" / "summary.json").write_text(json.dumps(summary))
    (group,) = group_runs(find_runs([tmp_path])[0])
    assert group.final("test/personal/accuracy") is None
    assert group.final("test/global/accuracy").mean == pytest.approx(0.625)
