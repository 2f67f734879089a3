"""Runs of a table, side by side, each once: what is done is a row of a CSV, and is not done again.

A run is a config, as ``python -m pl_fed fit --config`` takes it. It goes on where it was killed, if
its config is the same: its folder lies under ``runs/`` until its row is written. A row stands for
the names in it: whoever changes a config deletes its rows. "seconds" in a row are processor time,
but of what was done before a run was killed, the time that its rounds took.
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
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pl_fed.run_folder import try_lock

ROOT = Path(__file__).parent.parent
_RUNS_OF_A_WORKER = 25
Row = dict[str, str]
Rows = Mapping[str, list[Row]]  # by the name of the CSV that they go to
Config = dict[str, Any]
QUIET: Config = {  # a trainer that shows nothing, on the CPU
    "num_sanity_val_steps": 0,
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass
class Fitted:
    """What a run left in its folder.

    Attributes:
        config: Its config.
        last: The row of the test in metrics.csv, by column.
        rounds: All rows of metrics.csv.
        clients: The rows of per_client.csv.
        validation: The rows of per_client_validation.csv; none without a validation.
        before: Seconds of the rounds that were done before it was killed, if it was.
    """

    config: Config
    last: Row
    rounds: list[Row]
    clients: list[Row]
    validation: list[Row]
    before: float = 0.0

    def tested(self, models: Iterable[str]) -> list[str]:
        """Return those of some models that were tested."""
        return [model for model in models if self.last.get(f"test/{model}/accuracy")]

    def validated(self, column: str) -> str:
        """Return a column of the last round that has it."""
        return [row[column] for row in self.rounds if row.get(column)][-1]


@dataclass(frozen=True)
class Job:
    """One run: what names it, and its config, if it has one."""

    key: tuple[str, ...]
    config: Config = field(default_factory=dict, hash=False, compare=False)


def merged(*configs: Mapping[str, Any]) -> Config:
    """Lay configs on top of each other: what is given later counts, classes as a whole."""
    result: Config = {}
    for config in configs:
        for name, value in config.items():
            old = result.get(name)
            joins = isinstance(value, Mapping) and isinstance(old, Mapping)
            if joins and "class_path" not in value:
                result[name] = merged(old, value)
            else:
                result[name] = deepcopy(value)
    return result


def made(path: str, /, **arguments: Any) -> Config:
    """Return the config of an object of a class."""
    return {"class_path": path, "init_args": arguments} if arguments else {"class_path": path}


def fit(config: Config, folder: Path) -> Fitted:
    """Run a federation in this process, or go on with what there is of it in ``folder``.

    What another config left there is deleted, and a run whose checkpoint was cut off.
    """
    from pl_fed.command.fit import FederatedCLI
    from pl_fed.run_folder import last_checkpoint

    file = folder / "config.yaml"
    text = yaml.safe_dump(merged(config, {"trainer": {"default_root_dir": str(folder)}}))
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
    tables = ("per_client.csv", "per_client_validation.csv")
    return Fitted(config, rounds[-1], rounds, *(read(run / table) for table in tables), before)


def quiet() -> None:
    """Make a process of the pool say nothing of each run, use one thread, and end with its parent.

    A worker whose parent was killed would go on, beside those of the next try.
    """
    import torch

    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _end_with(sentinel: int) -> None:
    """Wait for another process to end, and end."""
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def work(
    jobs: Sequence[Job],
    results: Path,
    names: Sequence[str],
    rows_of: Callable[[Fitted], Rows],
    workers: int = 2,
) -> None:
    """Run the configs that are missing, as :func:`each_once`.

    Args:
        jobs: All runs.
        results: The CSV that says which are done: a row each, named by ``names``.
        names: The columns of a job's key.
        rows_of: What is kept of a run: rows by the name of the CSV that they go to, ``results``
            among them.
        workers: Processes.
    """
    table = results.parent.name

    def clear(job: Job) -> None:
        shutil.rmtree(_folder(job, table), ignore_errors=True)

    run = functools.partial(_fitted, results=results, rows_of=rows_of)
    each_once(jobs, results, names, run, workers, clear)


def each_once(
    jobs: Sequence[Job],
    results: Path,
    names: Sequence[str],
    run: Callable[[Job], Rows],
    workers: int = 2,
    on_written: Callable[[Job], None] | None = None,
) -> None:
    """Do what is missing of some jobs; one that fails has a row that says why.

    The next time it is tried again. In the end rows are in the order of the jobs, unless there are
    others.

    Args:
        jobs: All of them.
        results: See :func:`work`.
        names: See :func:`work`.
        run: Does a job, in a process of a pool, and returns its rows by the name of their CSV. What
            took time before counts, too: "seconds" in the row of ``results``, if it is there.
        workers: Processes.
        on_written: Called with a job whose rows are written, unless it failed.

    Raises:
        SystemExit: If somebody else is at work in the same folder. When all is done, if a job
            failed: nobody makes a table without it.
    """
    results.parent.mkdir(parents=True, exist_ok=True)
    with try_lock(results.parent) as alone:
        if not alone:
            sys.exit(f"Expected no other command to be writing to {results.parent} but one is.")
        done = {key_of(row, names) for row in finished(results)}
        missing = [job for job in jobs if job.key not in done]
        print(f"{len(jobs)} runs, {len(missing)} of them missing", flush=True)
        files: set[str] = set()
        for number, (job, kept) in enumerate(_all_done(missing, run, results.name, workers), 1):
            (row,) = kept[results.name]
            for name in sorted(kept, key=lambda name: name == results.name):  # this one last
                rows = [{**dict(zip(names, job.key)), **row} for row in kept[name]]
                append(results.parent / name, names, job.key, rows)
            said = row["failed"] or f"{row['seconds']} s"
            print(f"{number}/{len(missing)} {', '.join(job.key)}: {said}", flush=True)
            files |= kept.keys()
            if on_written and not row["failed"]:
                on_written(job)
        order = {job.key: place for place, job in enumerate(jobs)}
        for name in files:
            rows = read(results.parent / name)
            if order.keys() >= {key_of(row, names) for row in rows}:
                rows.sort(key=lambda row: order[key_of(row, names)])
                write(results.parent / name, rows)
        tried = (row["failed"] for row in read(results) if key_of(row, names) in order)
        if failed := sum(map(bool, tried)):
            sys.exit(
                f"{failed} failed, as {results} says, and tables and pictures are as they were: the"
                " same command tries again."
            )


def _all_done(
    jobs: Sequence[Job], run: Callable[[Job], Rows], results: str, workers: int
) -> Iterator[tuple[Job, Rows]]:
    """Do jobs in a pool, and yield each when it is done.

    Workers grow from run to run, so that a new pool takes over now and then: that of the standard
    library waits for ever when its own workers end (max_tasks_per_child, CPython issue 115634).
    """
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")  # of workers
    context = multiprocessing.get_context("spawn")
    at_once = _RUNS_OF_A_WORKER * workers
    for first in range(0, len(jobs), at_once):
        with ProcessPoolExecutor(workers, context, quiet) as pool:
            some = jobs[first : first + at_once]
            futures = {pool.submit(_done, job, run, results): job for job in some}
            for future in as_completed(futures):
                yield futures[future], future.result()


def _done(job: Job, run: Callable[[Job], Rows], results: str) -> Rows:
    """Do a job; add to its row how long it took, and why it failed."""
    started = sum(os.times()[:4])  # its own and its children's, user and system
    try:
        kept, failed = {**run(job)}, ""
    except (Exception, SystemExit) as error:  # one that goes up would take the others with it
        kept, failed = {results: [{}]}, " ".join(f"{type(error).__name__}: {error}".split())
    taken = sum(os.times()[:4]) - started
    for row in kept[results]:
        row |= {"seconds": f"{taken + float(row.pop('seconds', 0)):.1f}", "failed": failed}
    return kept


def _fitted(job: Job, results: Path, rows_of: Callable[[Fitted], Rows]) -> Rows:
    """Run a config, and keep of its folder what is wanted, and how long it took before a kill."""
    fitted = fit(job.config, _folder(job, results.parent.name))
    kept = rows_of(fitted)
    rows = [{**row, "seconds": str(fitted.before)} for row in kept[results.name]]
    return {**kept, results.name: rows}


def _folder(job: Job, table: str) -> Path:
    name = "_".join(job.key).replace("/", "-").replace(" ", "-")
    return ROOT / "runs" / "experiments" / table / name


def read(path: Path) -> list[Row]:
    """Return the rows that there are."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def finished(path: Path) -> list[Row]:
    """Return the rows of runs that did not fail."""
    return [row for row in read(path) if not row.get("failed")]


def key_of(row: Row, names: Iterable[str]) -> tuple[str, ...]:
    """Return what a row has in some columns."""
    return tuple(row[name] for name in names)


def append(path: Path, names: Sequence[str], key: tuple[str, ...], rows: Iterable[Row]) -> None:
    """Write a run's rows, in place of what a killed run may have left there of it."""
    old = [row for row in read(path) if key_of(row, names) != key]
    write(path, [*old, *rows])


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows, as a whole or not at all."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)


def shorter(value: str | float) -> str:
    """Return a number with the digits that are worth keeping."""
    return f"{float(value):.5g}"


def grouped(rows: Iterable[Row], *names: str) -> Iterator[tuple[tuple[str, ...], list[Row]]]:
    """Yield rows that agree in some columns, in the order in which they come first."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(key_of(row, names), []).append(row)
    yield from groups.items()
