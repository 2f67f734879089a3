"""A study: its cells, their execution and their results."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pl_fed.arguments import check_writable
from pl_fed.files import wait_for_lock
from pl_fed.studies.cards import list_cards, may_use_card
from pl_fed.studies.cell_folder import LOCKS, State, write_text
from pl_fed.studies.cells import Cell, expand
from pl_fed.studies.engines import open_remote_pool
from pl_fed.studies.execution import Event, Execution
from pl_fed.studies.inspection import (
    CellStatus,
    RecordedRows,
    check_configs,
    needs_check,
    read_states,
)
from pl_fed.studies.pool import Pool, WorkerPool, count_cores
from pl_fed.studies.readers import StudyError, refuse
from pl_fed.studies.remote_pool import read_remote
from pl_fed.studies.results import (
    RESULTS,
    copy_aside,
    list_foreign,
    list_lost,
    make_row,
    read_table,
    write_results,
)
from pl_fed.studies.selection import Selection, read_only
from pl_fed.studies.spec import StudySpec, read_spec, read_spec_file
from pl_fed.studies.tuning import Tuner

DESCRIPTION = "study.json"
"""Name of the file in a study's folder that describes its axes, seeds and cells."""


class Study:
    """Study: a set of runs, one for each combination of values and each seed.

    Args:
        name: The name; letters, digits, ``_``, ``.`` and ``-``.
        base: The config of all cells: names of configs, values of arguments by their paths, or a
            list of both.
        axes: For each axis a mapping of labels to changes of the config, or a list of values.
        seeds: The number of seeds, or a list of them.
        leave_out: Combinations of labels that the study does not run.
        compare: The tests of the study's report.
        options: How the study runs, such as ``workers`` and ``folder``.
        tune: The tuning: the same number of trials for each label of an axis.

    Raises:
        ValueError: If an argument is invalid; with one sentence.

    Example:
        >>> study = Study(
        ...     "lam", base=["quickstart"], axes={"model.lam": [0.1, 1.0]}, seeds=2,
        ... )
        >>> [cell.name for cell in study.cells]  # doctest: +NORMALIZE_WHITESPACE
        ['model.lam=0.1,seed=0', 'model.lam=0.1,seed=1',
         'model.lam=1,seed=0', 'model.lam=1,seed=1']
    """

    def __init__(
        self,
        name: str,
        base: Any,
        axes: Mapping[str, Any] | None = None,
        seeds: int | Sequence[int] = 1,
        leave_out: Sequence[Mapping[str, Any]] = (),
        compare: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        tune: Mapping[str, Any] | None = None,
    ) -> None:
        spec = read_spec(
            {
                "name": name,
                "base": base,
                "axes": axes,
                "seeds": seeds,
                "leave_out": list(leave_out),
                "compare": compare,
                "options": options,
                "tune": tune,
            }
        )
        self._begin(spec)

    def _begin(self, spec: StudySpec) -> None:
        """Set the study, with the cells of the chosen values if the tuning has ended."""
        self.spec = spec
        self.tuner = None if spec.tune is None else Tuner(spec)
        if self.tuner is not None:
            self.tuner.read()
        self.cells = self._expand()

    def _expand(self) -> list[Cell]:
        return expand(self.spec, None if self.tuner is None else self.tuner.chosen())

    @classmethod
    def from_spec(cls, spec: StudySpec) -> "Study":
        """Return the study of a checked description."""
        study = cls.__new__(cls)
        study._begin(spec)
        return study

    @classmethod
    def from_file(
        cls, path: str | Path, folder: str | Path | None = None, on: str | None = None
    ) -> "Study":
        """Return the study in a YAML file.

        Args:
            path: The file.
            folder: The folder of the study; by default that of the file, else ``runs/<name>``.
            on: The engine that runs cells; by default that of the file, else this machine.

        Raises:
            ValueError: If the file describes no study; with one sentence.
        """
        spec = read_spec_file(path)
        if folder is not None:
            spec = replace(spec, options=replace(spec.options, folder=str(folder)))
        if on is not None and (spec.options.on is None or spec.options.on.engine != on):
            spec = replace(spec, options=replace(spec.options, on=read_remote("on", on)))
        return cls.from_spec(spec)

    @cached_property
    def folder(self) -> Path:
        """The folder of the study."""
        return self.spec.folder

    def select(self, only: Sequence[str] = ()) -> list[Cell]:
        """Return the cells with some labels.

        Args:
            only: Labels such as ``algorithm=ditto``; of the same axis, either of them.

        Raises:
            ValueError: If an axis or a label does not exist, or no cell has the labels.
        """
        selection = read_only(only, self.spec.axes) if only else Selection()
        cells = [cell for cell in self.cells if selection.includes(cell.values, cell.seed)]
        if not cells:
            raise StudyError(
                f"Expected argument `only` to match at least one cell but got {', '.join(only)}."
            )
        return cells

    def open_runners(self, workers: int | None = None, cells: int | None = None) -> Pool:
        """Start the processes that run cells: workers here, or those of ``options.on``.

        Args:
            workers: Their number; by default that of the study, else that which there is room for.
            cells: The number of cells; more workers would have nothing to do.

        Raises:
            ValueError: If the engine of ``options.on`` is not installed, or cannot be reached.
        """
        options = self.spec.options
        if options.on is None:
            return self.open_pool(workers, cells)
        count = workers or options.workers
        limit = options.runs_per_worker
        return open_remote_pool(options.on, self.folder, self.open_pool, count, limit)

    def open_pool(self, workers: int | None = None, cells: int | None = None) -> WorkerPool:
        """Start workers on this machine.

        If runs may use graphics cards, workers take the visible cards in turn.

        Args:
            workers: Their number; by default see :meth:`count_workers`.
            cells: The number of cells; more workers would have nothing to do.
        """
        count = min(
            self.count_workers(workers), len(self.cells) if cells is None else max(cells, 1)
        )
        limit, words = self.spec.options.runs_per_worker, self.cells[0].arguments
        return WorkerPool(count, limit, words, self._cards)

    def count_workers(self, workers: int | None = None) -> int:
        """Return the number of workers on this machine.

        Args:
            workers: Their number, if the user sets it; by default that of the study, else
                ``runs_per_gpu`` for each graphics card that runs may use, else the number of cores.
        """
        options = self.spec.options
        return (
            workers or options.workers or len(self._cards) * options.runs_per_gpu or count_cores()
        )

    @cached_property
    def _cards(self) -> tuple[str, ...]:
        """The graphics cards for runs; none if all runs use the CPU."""
        return list_cards() if any(may_use_card(cell.change) for cell in self.cells) else ()

    def read_states(self, only: Sequence[str] = ()) -> list[CellStatus]:
        """Return the states of cells by their folders and the table of recorded results alone.

        Args:
            only: Labels of the cells, such as ``algorithm=ditto``.

        Raises:
            ValueError: If the table of recorded results does not exist, or is no such table.
        """
        path = self.spec.options.recorded
        if path is not None and not Path(path).is_file():
            refuse("options.recorded", "be a table of results", path, "there is no such file")
        recorded = None if path is None else read_table(Path(path), self.spec.axes)
        return read_states(self.folder, self.select(only), recorded)

    def inspect(self, only: Sequence[str] = ()) -> list[CellStatus]:
        """Return the states of cells; starts a worker to compare complete configs if inputs differ.

        Args:
            only: Labels of the cells, such as ``algorithm=ditto``.
        """
        statuses = self.read_states(only)
        changed = [status for status in statuses if status.state is State.CHANGED]
        if not changed:
            return statuses
        with self.open_pool(1) as pool, contextlib.suppress(StudyError):  # an invalid one differs
            changed = check_configs(self.folder, changed, pool)
        by_path = {status.cell.path: status for status in changed}
        return [by_path.get(status.cell.path, status) for status in statuses]

    def run(
        self,
        workers: int | None = None,
        only: Sequence[str] = (),
        report: Callable[[Event], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Run the cells without a result, and return the rows of all cells.

        Args:
            workers: The number of processes; by default that of the study, else the number of
                cores.
            only: Labels of the cells to run, such as ``algorithm=ditto``.
            report: Receives an event for each ended attempt, and ticks.

        Raises:
            ValueError: If the config of a cell, or an earlier ``results.csv``, is invalid, or the
                study's folder cannot be written; before the first run.
        """
        check_writable(**{"options.folder": self.folder})
        self._read_earlier()
        self.tune(workers, only, report)
        statuses = self.read_states(only)
        if needs_check(statuses):
            missing = sum(not status.state.is_result for status in statuses)
            with self.open_runners(workers, missing) as pool:
                checked = check_configs(self.folder, statuses, pool)
                self._describe()
                todo = _order([status for status in checked if not status.state.is_result])
                keep = self.spec.options.keep_checkpoints
                listener = report or (lambda _: None)
                Execution(self.spec.name, self.folder, todo, keep, listener).run(pool)
        self._remove_checkpoints(statuses)
        return self._write_results()

    def _write_results(self) -> list[dict[str, Any]]:
        """Write the rows of all cells, and return them.

        Only one start reads states and writes at a time: the table of the last one to end then has
        the results of all.
        """
        with wait_for_lock(self.folder / LOCKS / RESULTS):
            earlier = self._read_earlier()
            statuses = self.inspect()
            rows = [make_row(status, earlier) for status in statuses]
            if list_lost(rows, statuses, earlier) or list_foreign(statuses, earlier):
                copy_aside(self.folder)
            write_results(self.folder, rows)
        return rows

    def _read_earlier(self) -> RecordedRows:
        """Return the rows of the table of results in the study's folder, if there is one."""
        return read_table(self.folder / RESULTS, self.spec.axes, "the study's results.csv")

    def _remove_checkpoints(self, statuses: Sequence[CellStatus]) -> None:
        """Remove the checkpoints of finished runs that an earlier, killed start left behind."""
        for status in () if self.spec.options.keep_checkpoints else statuses:
            if status.state.is_result and status.state is not State.RECORDED:
                with status.folder.lock() as is_alone:
                    if is_alone:
                        status.folder.remove_checkpoints()

    def tune(
        self,
        workers: int | None = None,
        only: Sequence[str] = (),
        report: Callable[[Event], None] | None = None,
    ) -> None:
        """Run the missing trials of the tuning, if the study has one; then cells have their values.

        Args:
            workers: The number of processes; by default that of the study, else the number of
                cores.
            only: Labels of the cells to run later; other labels of the tuned axis are not tuned,
                and neither are those whose cells are all recorded.
            report: Receives an event for each ended attempt, and ticks.

        Raises:
            ValueError: If the config of a trial is invalid, the study's folder cannot be written, a
                run does not have the metric, or all trials of a label have failed.
        """
        if self.tuner is None:
            return
        check_writable(**{"options.folder": self.folder})
        if labels := self.list_labels_to_tune(only):
            self.tuner.run(lambda: self.open_runners(workers), labels, report or (lambda _: None))
            trials = [item.trial for label in labels for item in self.tuner.trials[label]]
            cells = [cell for trial in trials for cell in trial.cells]
            self._remove_checkpoints(read_states(self.folder, cells))
            self.cells = self._expand()

    def list_labels_to_tune(self, only: Sequence[str] = ()) -> list[str]:
        """Return the labels of the tuned axis that have a cell without a recorded row.

        Args:
            only: Labels of the cells, such as ``algorithm=ditto``.
        """
        if self.tuner is None:
            return []
        states = self.read_states(only)
        open_cells = [status.cell for status in states if status.state is not State.RECORDED]
        return list(dict.fromkeys(cell.values[self.tuner.plan.per] for cell in open_cells))

    def _describe(self) -> None:
        """Write the axes, seeds and cells of the study to its folder."""
        compare = self.spec.compare
        description = {
            "name": self.spec.name,
            "axes": {axis.name: list(axis.labels) for axis in self.spec.axes},
            "seeds": list(self.spec.seeds),
            "cells": {cell.path: cell.labels for cell in self.cells},
            "compare": compare
            and {"metrics": compare.metrics, "baseline": dict(compare.baseline.labels)},
        }
        write_text(self.folder / DESCRIPTION, json.dumps(description, indent=1) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each cell: labels, seed, status, and the numbers of its summary.

        A cell without a folder has its row of an earlier ``results.csv``, as in the report.
        """
        earlier = self._read_earlier()
        return [make_row(status, earlier) for status in self.inspect()]

    def results(self) -> Any:
        """Return the rows as a pandas frame.

        Raises:
            ImportError: Without pandas; ``pip install pl_fed[study]`` installs it.
        """
        try:
            import pandas as pd
        except ImportError:
            raise ImportError(
                "Expected pandas to be installed but found none: install pl_fed[study], or use"
                " `rows()`, which gives a list of dictionaries."
            ) from None
        return pd.DataFrame(self.rows())

    def report(self) -> Path:
        """Write tables and pictures of the results that are there, and return the page.

        It runs nothing. Missing, failed and diverged cells are listed.

        Raises:
            ValueError: If no cell has a result, or the comparison cannot be made.
        """
        from pl_fed.studies.report import write_report  # matplotlib takes long to import

        return write_report(self)


def _order(statuses: list[CellStatus]) -> list[CellStatus]:
    """Return cells with one seed of each condition first: a faulty condition fails early."""
    places: dict[str, int] = {}
    keys = {}
    for status in statuses:
        condition = status.cell.condition
        places[condition] = keys[status.cell.path] = places.get(condition, -1) + 1
    return sorted(statuses, key=lambda status: keys[status.cell.path])
