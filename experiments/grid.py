"""Parallel runs of a table: each run writes its rows to CSV files once, and is not repeated.

A run is a config of ``python -m pl_fed fit --config``. A killed run resumes if its config is the
same; its folder stays under ``runs/`` until its rows are written. Rows are found by the names in
them, so delete the rows of a run when you change its config. ``seconds`` in a row is processor
time; for rounds before a kill, it is their wall time.
"""

import contextlib
import csv
import functools
import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import sys
import tempfile
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pl_fed.run_folder import try_lock

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    import pl_fed
    from pl_fed.clients import Client

ROOT = Path(__file__).parent.parent
_RUNS_PER_WORKER = 25
Row = dict[str, str]
Rows = Mapping[str, list[Row]]  # name of a CSV → rows for it
Config = dict[str, Any]
QUIET: Config = {  # a trainer without output, on the CPU
    "num_sanity_val_steps": 0,
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass
class FitResult:
    """Results of a finished run, read from its folder.

    Attributes:
        config: The run's config.
        last: The row of the test in metrics.csv, by column.
        rounds: All rows of metrics.csv.
        clients: The rows of per_client.csv.
        validation: The rows of per_client_validation.csv; none without a validation.
        before: Seconds of the rounds before a kill; 0 if the run was not killed.
        run: The run's folder.
    """

    config: Config
    last: Row
    rounds: list[Row]
    clients: list[Row]
    validation: list[Row]
    before: float = 0.0
    run: Path = Path()

    def tested_models(self, models: Iterable[str]) -> list[str]:
        """Return the models with test results, out of the given names."""
        return [model for model in models if self.last.get(f"test/{model}/accuracy")]

    def last_value(self, column: str) -> str:
        """Return a column's value in the last round that has one."""
        return [row[column] for row in self.rounds if row.get(column)][-1]


def test_again(fitted: FitResult, change: Config) -> FitResult:
    """Test a run's last checkpoint once more, with a changed config, and return the results."""
    from pl_fed.command.fit import FederatedCLI
    from pl_fed.run_folder import last_checkpoint

    folder = fitted.run / "again"
    folder.mkdir(exist_ok=True)
    config = merge_configs(fitted.config, change, {"trainer": {"default_root_dir": str(folder)}})
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    arguments = ["test", "--config", str(file), "--ckpt_path", str(last_checkpoint(fitted.run))]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        run = Path(FederatedCLI(arguments).run_dir or folder)
    rounds = read(run / "metrics.csv")
    return FitResult(config, rounds[-1], rounds, read(run / "per_client.csv"), [], run=run)


@dataclass(frozen=True)
class Job:
    """Job: one run with its key, the values of its names, and a config if it fits one."""

    key: tuple[str, ...]
    config: Config = field(default_factory=dict, hash=False, compare=False)


def merge_configs(*configs: Mapping[str, Any]) -> Config:
    """Merge configs: later values replace earlier ones; an object with a class is one value."""
    result: Config = {}
    for config in configs:
        for name, value in config.items():
            old = result.get(name)
            both_mappings = isinstance(value, Mapping) and isinstance(old, Mapping)
            if both_mappings and "class_path" not in value:
                result[name] = merge_configs(old, value)
            else:
                result[name] = deepcopy(value)
    return result


def spec(path: str, /, **arguments: Any) -> Config:
    """Return the config of an object: its class and its arguments."""
    return {"class_path": path, "init_args": arguments} if arguments else {"class_path": path}


def fit(config: Config, folder: Path) -> FitResult:
    """Run a federation in this process, or resume its run in ``folder``.

    Deletes runs of another config in the folder, and runs with a truncated checkpoint.
    """
    from pl_fed.command.fit import FederatedCLI
    from pl_fed.run_folder import last_checkpoint

    file = folder / "config.yaml"
    text = yaml.safe_dump(merge_configs(config, {"trainer": {"default_root_dir": str(folder)}}))
    if not file.exists() or file.read_text() != text:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        file.write_text(text)
    arguments = ["fit", "--config", str(file)]
    before = 0.0
    saved = {run: last_checkpoint(run) for run in folder.iterdir() if run.is_dir()}
    for run, last in saved.items():
        if last and not zipfile.is_zipfile(last):
            shutil.rmtree(run)
    if killed := [run for run, last in saved.items() if last and run.exists()]:
        arguments += ["--ckpt_path", "last"]
        earlier = [row for run in killed for row in read(run / "metrics.csv")]
        before = sum(float(row.get("time/round") or 0) for row in earlier)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        run = Path(FederatedCLI(arguments).run_dir or folder)
    rounds = read(run / "metrics.csv")
    clients, validation = read(run / "per_client.csv"), read(run / "per_client_validation.csv")
    return FitResult(config, rounds[-1], rounds, clients, validation, before, run)


def silence_worker() -> None:
    """Make a worker process silent and single-threaded, and end it with its parent.

    The worker of a killed parent would continue beside the workers of the next attempt.
    """
    import torch

    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _exit_after(sentinel: int) -> None:
    """Exit as soon as another process has ended."""
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def work(
    jobs: Sequence[Job],
    results: Path,
    names: Sequence[str],
    rows_of: Callable[[FitResult], Rows],
    workers: int = 2,
) -> None:
    """Fit the configs of the missing jobs by :func:`run_missing`, and delete their folders.

    Args:
        jobs: All jobs.
        results: The CSV with one row per finished job.
        names: Names of the columns that hold a job's key.
        rows_of: Returns the rows to write for a run, by name of their CSV; includes ``results``.
        workers: Number of worker processes.
    """
    table = results.parent.name

    def clear(job: Job) -> None:
        shutil.rmtree(_folder(job, table), ignore_errors=True)

    run = functools.partial(_fit_job, results=results, rows_of=rows_of)
    run_missing(jobs, results, names, run, workers, clear)


def run_missing(
    jobs: Sequence[Job],
    results: Path,
    names: Sequence[str],
    run: Callable[[Job], Rows],
    workers: int = 2,
    on_written: Callable[[Job], None] | None = None,
) -> None:
    """Run the missing jobs; the row of a failed job holds its error, and the next call retries it.

    At the end, rows are sorted in the order of the jobs, unless the CSV has rows of other jobs.

    Args:
        jobs: All jobs.
        results: The CSV with one row per finished job.
        names: Names of the columns that hold a job's key.
        run: Runs a job in a worker process and returns its rows by name of their CSV. A value
            ``seconds`` in the row of ``results`` is added to the measured time.
        workers: Number of worker processes.
        on_written: Called with each successful job after its rows are written.

    Raises:
        SystemExit: If another command writes to the same folder; or, after all jobs, if a job
            failed, so that no table is made without it.
    """
    results.parent.mkdir(parents=True, exist_ok=True)
    with try_lock(results.parent) as alone:
        if not alone:
            sys.exit(f"Expected no other command to be writing to {results.parent} but one is.")
        done = {key_of(row, names) for row in finished_rows(results)}
        missing = [job for job in jobs if job.key not in done]
        print(f"{len(jobs)} runs, {len(missing)} of them missing", flush=True)
        files: set[str] = set()
        runs = _run_in_pool(missing, run, results.name, workers)
        for number, (job, tables) in enumerate(runs, 1):
            (row,) = tables[results.name]
            for name in sorted(tables, key=lambda name: name == results.name):  # results last
                rows = [{**dict(zip(names, job.key)), **row} for row in tables[name]]
                append(results.parent / name, names, job.key, rows)
            outcome = row["failed"] or f"{row['seconds']} s"
            print(f"{number}/{len(missing)} {', '.join(job.key)}: {outcome}", flush=True)
            files |= tables.keys()
            if on_written and not row["failed"]:
                on_written(job)
        order = {job.key: place for place, job in enumerate(jobs)}
        for name in files:
            rows = read(results.parent / name)
            if order.keys() >= {key_of(row, names) for row in rows}:
                rows.sort(key=lambda row: order[key_of(row, names)])
                write(results.parent / name, rows)
        errors = (row["failed"] for row in read(results) if key_of(row, names) in order)
        if failed := sum(map(bool, errors)):
            sys.exit(
                f"Failed runs: {failed}, with their errors in {results}. Tables and pictures stay"
                " unchanged; repeat the command to retry the runs."
            )


def _run_in_pool(
    jobs: Sequence[Job], run: Callable[[Job], Rows], results: str, workers: int
) -> Iterator[tuple[Job, Rows]]:
    """Run jobs in a pool, and yield each job with its rows when it ends.

    The memory of workers grows from run to run, so a new pool replaces them after some runs. The
    executor's own ``max_tasks_per_child`` waits for ever (CPython issue 115634).
    """
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")  # for workers
    context = multiprocessing.get_context("spawn")
    pool_size = _RUNS_PER_WORKER * workers
    for first in range(0, len(jobs), pool_size):
        with ProcessPoolExecutor(workers, context, silence_worker) as pool:
            pool_jobs = jobs[first : first + pool_size]
            futures = {pool.submit(_run_job, job, run, results): job for job in pool_jobs}
            for future in as_completed(futures):
                yield futures[future], future.result()


def _run_job(job: Job, run: Callable[[Job], Rows], results: str) -> Rows:
    """Run a job, and add its ``seconds`` and its error (``failed``) to the row of results."""
    started = sum(os.times()[:4])  # user and system time of this process and its children
    try:
        tables, failed = {**run(job)}, ""
    except (Exception, SystemExit) as error:  # a raised error would end the whole pool
        tables, failed = {results: [{}]}, " ".join(f"{type(error).__name__}: {error}".split())
    elapsed = sum(os.times()[:4]) - started
    for row in tables[results]:
        row |= {"seconds": f"{elapsed + float(row.pop('seconds', 0)):.1f}", "failed": failed}
    return tables


def _fit_job(job: Job, results: Path, rows_of: Callable[[FitResult], Rows]) -> Rows:
    """Fit a job's config, and return its rows, with the seconds before a kill."""
    result = fit(job.config, _folder(job, results.parent.name))
    tables = rows_of(result)
    rows = [{**row, "seconds": str(result.before)} for row in tables[results.name]]
    return {**tables, results.name: rows}


def _folder(job: Job, table: str) -> Path:
    name = "_".join(job.key).replace("/", "-").replace(" ", "-")
    return ROOT / "runs" / "experiments" / table / name


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV; none if the file does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def finished_rows(path: Path) -> list[Row]:
    """Return the rows of successful runs."""
    return [row for row in read(path) if not row.get("failed")]


def key_of(row: Row, names: Iterable[str]) -> tuple[str, ...]:
    """Return the values of some columns of a row."""
    return tuple(row[name] for name in names)


def append(path: Path, names: Sequence[str], key: tuple[str, ...], rows: Iterable[Row]) -> None:
    """Write a run's rows in place of its rows from an earlier, killed attempt."""
    old = [row for row in read(path) if key_of(row, names) != key]
    write(path, [*old, *rows])


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to a CSV, completely or not at all."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)


def build_trainer(
    federation: "pl_fed.Federation",
    folder: str,
    rounds: int,
    callbacks: "list[Callback] | None" = None,
) -> "pl_fed.Trainer":
    """Return a trainer on the CPU that only trains: no validation, output or checkpoint."""
    import pl_fed  # the process that only starts workers does not need it

    return pl_fed.Trainer(
        federation,
        run_dir=folder,
        max_epochs=rounds,
        limit_val_batches=0,
        log_every_n_steps=0,
        enable_checkpointing=False,
        callbacks=callbacks,
        **QUIET,
    )


def fit_and_test(
    federation: "pl_fed.Federation",
    client: "Client",
    data: "pl_fed.FederatedData",
    rounds: int,
    callbacks: "list[Callback] | None" = None,
) -> dict[str, Any]:
    """Fit and test a federation without files of its own, and return its last metrics by name."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(federation, folder, rounds, callbacks)
        trainer.fit(client, data)
        fitted = dict(trainer.callback_metrics)
        trainer.test(client, data, verbose=False)
    return {**fitted, **trainer.callback_metrics}


def format_results(metrics: Mapping[str, Any], names: Iterable[str]) -> Row:
    """Return the tested metrics of the global and the personal models; empty without a model.

    Args:
        metrics: A trainer's metrics after its test.
        names: Names of the metrics, such as ``accuracy_worst10``.
    """
    row = {}
    for model in ("global", "personal"):
        for name in names:
            value = metrics.get(f"test/{model}/{name}")
            row[f"{model}_{name}"] = "" if value is None else f"{float(value):.4f}"
    return row


def shorten(value: str | float) -> str:
    """Return a number with five significant digits."""
    return f"{float(value):.5g}"


def group_rows(rows: Iterable[Row], *names: str) -> Iterator[tuple[tuple[str, ...], list[Row]]]:
    """Yield groups of rows with equal values in some columns, in the order of their first rows."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(key_of(row, names), []).append(row)
    yield from groups.items()
