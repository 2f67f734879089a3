"""The report of a study: tables and pictures from the results that are there. It runs nothing."""

import contextlib
import csv
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pl_fed.reports.picture import encode, encode_csv
from pl_fed.reports.privacy import EPSILON, describe_compositions
from pl_fed.reports.run import read_run
from pl_fed.studies import benefit
from pl_fed.studies.cell_folder import CellFolder, State, find_sibling
from pl_fed.studies.comparison import (
    Layout,
    MetricComparison,
    Row,
    arrange,
    choose_metrics,
    compare_methods,
)
from pl_fed.studies.metrics import choose_model
from pl_fed.studies.pictures import draw_pictures
from pl_fed.studies.readers import StudyError
from pl_fed.studies.results import RESULTS, list_outdated, make_row, read_table
from pl_fed.studies.study import Study
from pl_fed.studies.study_page import render_report
from pl_fed.studies.tables import (
    COMPARISON_COLUMNS,
    Table,
    join_columns,
    make_metric_table,
    make_test_table,
    make_tuning_table,
    name_files,
)
from pl_fed.studies.trials import TUNING
from pl_fed.studies.tuning import TABLE
from pl_fed.text import format_csv, read_csv

REPORT = "report"
"""Name of the report in a study's folder."""

PAGE = "index.html"
_OPEN = "cells.csv"


def write_report(study: Study) -> Path:
    """Write the report of a study from the results that are there, and return its page.

    Missing, failed and diverged cells are listed. Files of an earlier report are replaced.

    Args:
        study: The study.

    Raises:
        StudyError: If no cell has a result, or the comparison of the study cannot be made.
    """
    rows, directions, from_table, outdated = read_rows(study)
    results = [row for row in rows if State(row["status"]).is_result]
    if not results:
        raise StudyError(
            f"Expected the study {study.spec.name} to have a cell with a result but got none of"
            f" {len(rows)}: run it first, by the same command without --report."
        )
    compare = study.spec.compare
    layout = arrange(study.spec.axes, compare, rows)
    declared = {} if compare is None else compare.directions
    comparisons = [
        compare_methods(metric, layout, rows, directions, declared)
        for metric in choose_metrics(compare, rows)
    ]
    tables = [make_metric_table(item, name_files(item.metric)) for item in comparisons]
    tests = [make_test_table(item, f"{name_files(item.metric)}_tests") for item in comparisons]
    tuned = _read_tuning(study)
    gains, clients = _measure_benefit(study, rows, layout, comparisons)
    pictures = list(draw_pictures(comparisons))
    notes = _describe(study, rows, layout, comparisons, from_table, outdated, bool(tuned))
    notes += _describe_privacy(study.folder, from_table)
    cells = _list_open_cells(study, rows)
    files: dict[str, bytes] = {}
    for table in [*tables, *(table for table in tests if table.rows), *tuned, *gains]:
        files |= _encode(table)
    records = [record for table in tests for record in table.records]
    files["comparisons.csv"] = encode(format_csv(records, COMPARISON_COLUMNS))
    if clients:
        files[f"tables/{benefit.NAME}_clients.csv"] = encode_csv(clients)
    if cells:
        files[_OPEN] = encode_csv(cells)
    for picture in pictures:
        files |= {f"pictures/{name}": content for name, content in picture.files().items()}
    page = render_report(
        study.spec.name, notes, comparisons, tables, tests, tuned, pictures, cells, gains
    )
    files[PAGE] = page.encode()
    return _replace_files(study.folder / REPORT, files) / PAGE


def read_rows(study: Study) -> tuple[list[dict[str, Any]], dict[str, bool | None], int, int]:
    """Return the rows of all cells, the directions of metrics, and numbers of rows of a table.

    A cell without a folder has its row of an earlier ``results.csv``, if there is one: committed
    results need no folders. The numbers are those of such rows, and of rows of another config.
    """
    statuses = study.inspect()
    earlier = read_table(study.folder / RESULTS, study.spec.axes, "the study's results.csv")
    directions: dict[str, bool | None] = {}
    rows, from_table = [], 0
    for status in statuses:
        row = make_row(status, earlier)
        is_found = status.state is State.MISSING and row["status"] != State.MISSING
        from_table += is_found or status.state is State.RECORDED
        if status.state is State.DONE:
            found = status.folder.read_summary().get("higher_is_better")
            directions |= dict(found) if isinstance(found, Mapping) else {}
        rows.append(row)
    return rows, directions, from_table, len(list_outdated(statuses, earlier))


def _read_tuning(study: Study) -> list[Table]:
    """Return the table of the tuning; none without trials of this plan.

    Trials with a folder are read from their folders: ``tuning.csv`` may be that of an earlier plan
    or base.
    """
    path, plan, tuner = study.folder / TABLE, study.spec.tune, study.tuner
    if plan is None or tuner is None:
        return []
    if any((study.folder / TUNING).glob("*/trial=*")):
        tuner.read()
        trials = [{n: "" if v is None else str(v) for n, v in row.items()} for row in tuner.rows()]
    else:
        trials = read_csv(path) if path.is_file() else []
    columns = {name for trial in trials for name in trial}
    arguments = {argument for space in plan.space.values() for argument in space}
    if not {plan.per, plan.metric, *arguments} <= columns:  # of another plan, or a part of it
        return []
    return [make_tuning_table(plan, trials)]


def _measure_benefit(
    study: Study,
    rows: Sequence[Row],
    layout: Layout,
    comparisons: Sequence[MetricComparison],
) -> tuple[list[Table], list[dict[str, Any]]]:
    """Return the table of gains over local training and its clients; none without local runs."""
    tested = [item for item in comparisons if item.metric.startswith("test/")]
    tested = [item for item in tested if "/held_out/" not in item.metric]
    if not tested:
        return [], []
    cells = [
        (cell, row, CellFolder(study.folder, cell.path)) for cell, row in zip(study.cells, rows)
    ]
    measured = benefit.measure_study(cells, layout, tested[0])
    if measured is None:
        return [], []
    table = benefit.make_benefit_table(measured, layout)
    return [table], list(benefit.list_clients(measured, cells, layout))


def _list_open_cells(study: Study, rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return the cells that are not done, with their state and the error of a failed one."""
    cells = []
    for cell, row in zip(study.cells, rows):
        if row["status"] != State.DONE:
            record = CellFolder(study.folder, cell.path).read_record()
            error = record.error if record is not None and row["status"] == State.FAILED else ""
            facts = {"status": str(row["status"]), "error": error}
            cells.append(join_columns(cell.labels, facts))
    return cells


def _describe(
    study: Study,
    rows: Sequence[Row],
    layout: Layout,
    comparisons: Sequence[MetricComparison],
    from_table: int,
    outdated: int,
    has_tuning: bool,
) -> list[str]:
    """Return the sentences at the top of the report.

    Args:
        study: The study.
        rows: The rows of all cells.
        layout: The methods and conditions.
        comparisons: The comparison by each metric.
        from_table: The number of rows from a table.
        outdated: The number of rows of an earlier table that are of another config.
        has_tuning: Whether there is a table of the tuning.
    """
    counts = {state: sum(row["status"] == state for row in rows) for state in State}
    states = ", ".join(f"{number} {state}" for state, number in counts.items() if number)
    notes = [f"{len(rows)} cells: {states}."]
    if from_table:
        notes.append(f"{from_table} cells have no folder here; their rows are from a table.")
    if outdated:
        notes.append(
            f"{outdated} cells have no folder here, and a row of another config in {RESULTS}: they"
            " have no result, and the study would run them."
        )
    if study.spec.tune is not None and not has_tuning:
        notes.append(f"The study tunes, but has no {TABLE} of all its arguments yet.")
    others = dict.fromkeys(
        layout.find_method(row)
        for item in comparisons
        for row in rows
        if row["status"] == State.DONE and choose_model(item.metric, row) != item.metric
    )
    if others:
        notes.append(f"Read by their global model, without a personal one: {', '.join(others)}.")
    return notes


def _describe_privacy(folder: Path, from_table: int) -> list[str]:
    """Return the guarantees of all private runs of a study together, by data set.

    All runs count that are in the study's folder, also unfinished ones and the trials of a tuning,
    and those that a changed config or a repeated cell has put beside it: their budget is spent.

    Args:
        folder: The study's folder.
        from_table: The number of cells without a folder.
    """
    runs = []
    folders = [folder, find_sibling(folder, "aside"), find_sibling(folder, "again")]
    for path in sorted(path for place in folders for path in place.rglob("metrics.csv")):
        with contextlib.suppress(OSError, ValueError):  # damaged; read_run refuses it
            with path.open(encoding="utf-8") as file:
                is_private = EPSILON in next(csv.reader(file), [])
            if is_private:
                runs.append(read_run(path.parent))
    notes = [*describe_compositions(runs)]
    if notes and from_table:
        notes.append("Private runs without a folder are not in these sums.")
    return notes


def _encode(table: Table) -> dict[str, bytes]:
    """Return the files of a table: CSV, markdown and LaTeX."""
    return {
        f"tables/{table.name}.csv": encode_csv(table.records),
        f"tables/{table.name}.md": table.markdown().encode(),
        f"tables/{table.name}.tex": table.latex().encode(),
    }


def _replace_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write the files of a report, and remove the tables and pictures of an earlier one."""
    for part in ("tables", "pictures"):
        shutil.rmtree(folder / part, ignore_errors=True)
    for name in (PAGE, _OPEN):
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder
