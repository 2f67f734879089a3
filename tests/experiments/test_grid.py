"""Runs of a table: each runs once, resumes after a kill, and gives the same row."""

import fcntl
import functools
import os

import pytest
from forked_processes import fork_context

from experiments import grid
from experiments.grid import (
    FitResult,
    Job,
    append,
    fit,
    group_rows,
    merge_configs,
    read,
    spec,
    work,
)
from experiments.tables import Comparison, format_mean_and_std, markdown

pytestmark = pytest.mark.slow

TINY = {
    "seed_everything": 3,
    "model": spec(
        "pl_fed.clients.Ditto",
        net=spec("pl_fed.models.MLP", in_features=64, hidden=[8], num_classes=10),
        lam=0.1,
    ),
    "data": {
        "dataset": spec("pl_fed.data.Digits"),
        "partitioner": spec("pl_fed.partitioners.Shards", classes_per_client=2),
        "num_clients": 10,
        "batch_size": 50,
    },
    "federation": {
        "sampler": spec("pl_fed.samplers.Uniform", cohort_size=4),
        "engine": {"name": "one_by_one"},
    },
    "trainer": {
        "max_epochs": 4,
        "check_val_every_n_epoch": 2,
        "num_sanity_val_steps": 0,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
}


@pytest.fixture
def forked_workers(monkeypatch):
    """Start workers as forks, without a new import of Lightning."""
    context = fork_context()
    monkeypatch.setattr(grid.multiprocessing, "get_context", lambda _: context)


def test_later_configs_replace_values_and_complete_classes():
    first = {"a": {"x": 1, "y": 2}, "net": spec("One", width=3)}
    second = {"a": {"y": 5}, "net": spec("Two", depth=1)}
    assert merge_configs(first, second) == {
        "a": {"x": 1, "y": 5},
        "net": spec("Two", depth=1),
    }
    assert first["a"] == {"x": 1, "y": 2}
    assert spec("path.Class", path="a file") == {
        "class_path": "path.Class",
        "init_args": {"path": "a file"},
    }


def test_resumed_run_equals_uninterrupted_run(tmp_path):
    uninterrupted = fit(TINY, tmp_path / "whole")
    assert [row["round"] for row in uninterrupted.rounds] == ["0", "1", "2", "3", "4"]
    assert len(uninterrupted.clients) == 10
    fit(merge_configs(TINY, {"trainer": {"max_epochs": 2}}), tmp_path / "killed")
    config = tmp_path / "killed" / "config.yaml"
    config.write_text(config.read_text().replace("max_epochs: 2", "max_epochs: 4"))
    marker = tmp_path / "killed" / "marker"
    marker.touch()
    (metrics,) = (tmp_path / "killed").glob("*/metrics.csv")
    before = sum(float(row["time/round"] or 0) for row in read(metrics))
    resumed = fit(TINY, tmp_path / "killed")
    assert resumed.before == before > uninterrupted.before == 0
    names = [name for name in uninterrupted.last if name.startswith("test/")]
    assert names
    assert [resumed.last[name] for name in names] == [uninterrupted.last[name] for name in names]
    assert resumed.clients == uninterrupted.clients
    assert resumed.validation == uninterrupted.validation
    assert len(uninterrupted.validation) == 10
    assert marker.exists(), "resumed in its folder"


def test_run_of_another_config_is_not_resumed(tmp_path):
    fit(merge_configs(TINY, {"trainer": {"max_epochs": 2}}), tmp_path / "run")
    other = merge_configs(TINY, {"data": {"batch_size": 20}})
    assert fit(other, tmp_path / "run").last == fit(other, tmp_path / "afresh").last


def test_run_with_a_truncated_checkpoint_restarts(tmp_path):
    uninterrupted = fit(TINY, tmp_path)
    (checkpoint,) = tmp_path.glob("*/checkpoints/last.ckpt")
    with checkpoint.open("r+b") as file:
        file.truncate(2000)
    again = fit(TINY, tmp_path)
    assert (again.last["round"], again.before) == ("4", 0)
    assert again.clients == uninterrupted.clients
    assert len(list(tmp_path.glob("*/checkpoints"))) == 1


def rows_of(fitted: FitResult):
    return {"results.csv": [{"accuracy": fitted.last["test/personal/accuracy"]}]}


def test_finished_jobs_are_not_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "ROOT", tmp_path)
    results = tmp_path / "table" / "results.csv"
    short = merge_configs(TINY, {"trainer": {"max_epochs": 1}})
    jobs = [Job(("a", "1"), short), Job(("b", "1"), short)]
    results.parent.mkdir()
    append(results, ("name", "seed"), ("a", "1"), [{"name": "a", "seed": "1", "accuracy": "0.5"}])
    work(jobs, results, ("name", "seed"), rows_of, workers=1)
    rows = {row["name"]: row for row in read(results)}
    assert list(rows) == ["a", "b"]
    assert rows["a"]["accuracy"] == "0.5"
    assert 0 < float(rows["b"]["accuracy"]) <= 1
    assert float(rows["b"]["seconds"]) > 0
    assert not (tmp_path / "runs" / "experiments" / "table" / "b_1").exists()
    assert rows["b"]["failed"] == ""
    before = results.read_text()
    work(jobs, results, ("name", "seed"), rows_of, workers=1)
    assert results.read_text() == before


def test_seconds_include_the_rounds_before_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "fit", lambda *_: FitResult({}, {}, [], [], [], before=1000.0))
    tables = {"results.csv": [{"accuracy": "0.5"}]}
    run = functools.partial(
        grid._fit_job, results=tmp_path / "results.csv", rows_of=lambda _: tables
    )
    (row,) = grid._run_job(Job(("a",)), run, "results.csv")["results.csv"]
    assert row["accuracy"] == "0.5"
    assert 1000 <= float(row["seconds"]) < 1100


def square_job_number(job: Job):
    return {"results.csv": [{"square": str(int(job.key[0]) ** 2)}]}


def test_replaced_workers_finish_all_jobs(tmp_path, monkeypatch, forked_workers):
    monkeypatch.setattr(grid, "_RUNS_PER_WORKER", 1)
    jobs = [Job((str(number),)) for number in range(5)]
    grid.run_missing(jobs, tmp_path / "results.csv", ("number",), square_job_number, workers=2)
    cells = {row["number"]: row["square"] for row in read(tmp_path / "results.csv")}
    assert cells == {"0": "0", "1": "1", "2": "4", "3": "9", "4": "16"}


def test_failed_run_is_recorded_and_retried_and_the_others_continue(
    tmp_path, monkeypatch, forked_workers
):
    monkeypatch.setattr(grid, "ROOT", tmp_path)
    results = tmp_path / "table" / "results.csv"
    short = merge_configs(TINY, {"trainer": {"max_epochs": 1}})
    broken = merge_configs(short, {"data": {"num_clients": 100_000}})
    with pytest.raises(SystemExit, match=r"Failed runs: 1, with their errors in .*results\.csv"):
        work([Job(("broken",), broken), Job(("whole",), short)], results, ("name",), rows_of, 1)
    rows = {row["name"]: row for row in read(results)}
    assert rows["broken"]["failed"].startswith("ValueError: Expected argument")
    assert rows["broken"]["accuracy"] == ""
    assert float(rows["whole"]["accuracy"]) > 0
    assert [row["name"] for row in grid.finished_rows(results)] == ["whole"]
    work([Job(("broken",), short), Job(("whole",), broken)], results, ("name",), rows_of, 1)
    rows = {row["name"]: row for row in read(results)}
    assert float(rows["broken"]["accuracy"]) > 0, "retried with a valid config"
    assert not rows["whole"]["failed"], "done before"


def fail_on_job_1(job: Job):
    if job.key == ("1",):
        raise KeyError("column")
    return square_job_number(job)


def test_any_exception_of_a_run_keeps_the_other_rows(tmp_path, forked_workers):
    jobs = [Job((str(number),)) for number in range(3)]
    with pytest.raises(SystemExit, match="Failed runs: 1"):
        grid.run_missing(jobs, tmp_path / "results.csv", ("number",), fail_on_job_1, workers=1)
    cells = {row["number"]: row["failed"] for row in read(tmp_path / "results.csv")}
    assert cells == {"0": "", "1": "KeyError: 'column'", "2": ""}
    other_jobs = [job for job in jobs if job.key != ("1",)]
    grid.run_missing(other_jobs, tmp_path / "results.csv", ("number",), fail_on_job_1, workers=1)


def test_rows_are_sorted_only_without_rows_of_other_jobs(tmp_path, forked_workers):
    results = tmp_path / "results.csv"
    jobs = [Job((str(number),)) for number in range(4)]
    grid.run_missing([jobs[2], jobs[0]], results, ("number",), square_job_number, workers=1)
    grid.run_missing([jobs[3]], results, ("number",), square_job_number, workers=1)
    assert [row["number"] for row in read(results)] == ["2", "0", "3"]
    grid.run_missing(jobs, results, ("number",), square_job_number, workers=1)
    assert [row["number"] for row in read(results)] == ["0", "1", "2", "3"]


def test_second_command_for_a_folder_is_refused(tmp_path):
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(SystemExit, match=r"no other command to be writing to .* but one is"):
        grid.run_missing([], tmp_path / "results.csv", ("number",), square_job_number)
    os.close(held)
    grid.run_missing([], tmp_path / "results.csv", ("number",), square_job_number)


def test_new_rows_replace_rows_of_a_killed_attempt(tmp_path):
    path = tmp_path / "curves.csv"
    append(path, ("run",), ("a",), [{"run": "a", "round": "0"}, {"run": "a", "round": "1"}])
    append(path, ("run",), ("b",), [{"run": "b", "round": "0", "more": "x"}])
    append(path, ("run",), ("a",), [{"run": "a", "round": "0"}])
    assert [(row["run"], row["round"], row["more"]) for row in read(path)] == [
        ("b", "0", "x"),
        ("a", "0", ""),
    ]
    groups = dict(group_rows(read(path), "run"))
    assert list(groups) == [("b",), ("a",)]


@pytest.mark.parametrize(("band", "agrees"), [(0.021, True), (0.019, False)])
def test_comparison_shows_difference_and_agreement(band, agrees):
    comparison = Comparison(paper=0.9, std=0.01, ours=[0.87, 0.89], band=band)
    assert comparison.difference == pytest.approx(-0.02)
    assert comparison.agrees is agrees
    assert comparison.cells(2) == ["0.90 ± 0.01", "0.88 ± 0.01", f"−0.02 {'✓' if agrees else '✗'}"]
    assert format_mean_and_std([], 2) == "–"
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
