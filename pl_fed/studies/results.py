"""Results of a study: one row for each cell."""

import csv
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pl_fed.studies.axes import Axis
from pl_fed.studies.cell_folder import State, find_sibling, iterate_numbers, write_text
from pl_fed.studies.inspection import CellStatus, RecordedRows
from pl_fed.studies.readers import StudyError
from pl_fed.studies.selection import SEED, match_label
from pl_fed.text import format_csv, read_csv

RESULTS = "results.csv"
"""Name of the table in a study's folder."""

DIGEST = "config_digest"
"""Name of the column with a short hash of a cell's config."""

_OF_A_MACHINE = ("seconds/", "processes")  # columns that a repeated run may change
_ENDED = (State.DONE, State.DIVERGED, State.FAILED)
_PARTS = ("metrics", "attack", "counts", "seconds")


def make_row(status: CellStatus, earlier: RecordedRows | None = None) -> dict[str, Any]:
    """Return the row of a cell: its labels, its seed, its state and all numbers of its summary.

    A cell without a result has no numbers, and no hash of its config. A metric that is undefined,
    as for a model that has diverged, is NaN. Metrics are named like ``test/personal/accuracy``,
    others ``attack/…``, ``counts/…`` and ``seconds/…``. A recorded cell has the row of its table.

    Args:
        status: The state of the cell.
        earlier: The rows of an earlier table, for missing cells without a folder: committed results
            need no folders. A row of another config does not count.
    """
    if status.state is State.RECORDED:
        return dict(status.row)
    row = _find_earlier(status, earlier or {})
    if row is not None and not _is_of_other_config(row, status):
        return dict(row)
    labels = {**status.cell.values, "seed": status.cell.seed, "status": str(status.state)}
    if not status.state.is_result:
        return labels
    summary = status.folder.read_summary()
    numbers: dict[str, Any] = {DIGEST: status.cell.config_digest}
    for part in _PARTS:
        values = summary.get(part)
        prefix = "" if part == "metrics" else f"{part}/"
        if isinstance(values, Mapping):
            numbers |= dict(iterate_numbers(values, prefix, reads_undefined=part == "metrics"))
    return {**labels, **numbers}


def list_outdated(statuses: Sequence[CellStatus], earlier: RecordedRows) -> list[CellStatus]:
    """Return the cells without a folder whose row of an earlier table is of another config."""
    found = [(status, _find_earlier(status, earlier)) for status in statuses]
    return [status for status, row in found if row and _is_of_other_config(row, status)]


def list_foreign(statuses: Sequence[CellStatus], earlier: RecordedRows) -> list[Mapping[str, Any]]:
    """Return the rows of an earlier table with labels or seeds that the study no longer has."""
    own = {frozenset(status.cell.labels.items()) for status in statuses}
    return [row for labels, row in earlier.items() if labels not in own]


def list_lost(
    rows: Sequence[Mapping[str, Any]], statuses: Sequence[CellStatus], earlier: RecordedRows
) -> list[Mapping[str, Any]]:
    """Return the results of an earlier table for cells without a result now.

    Args:
        rows: The rows of all cells.
        statuses: Their states.
        earlier: The rows of the earlier table.
    """
    open_cells = [s.cell for row, s in zip(rows, statuses) if not State(row["status"]).is_result]
    found = [earlier.get(frozenset(cell.labels.items())) for cell in open_cells]
    return [row for row in found if row is not None and State(row["status"]).is_result]


def _find_earlier(status: CellStatus, earlier: RecordedRows) -> Mapping[str, Any] | None:
    """Return the row of a missing cell in an earlier table; ``None`` if it has a folder."""
    row = earlier.get(frozenset(status.cell.labels.items()))
    if row is None or status.state is not State.MISSING or status.folder.path.exists():
        return None
    return row


def _is_of_other_config(row: Mapping[str, Any], status: CellStatus) -> bool:
    """Return whether a row is of another config; false without a hash or before a tuning."""
    is_comparable = DIGEST in row and status.cell.is_tuned
    return is_comparable and row[DIGEST] != status.cell.config_digest


def write_results(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write the table of results, without the times, and return its path.

    Equal cells give equal bytes, also after a stop.
    """
    columns = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in columns if not name.startswith(_OF_A_MACHINE)]
    path = folder / RESULTS
    write_text(path, format_csv(rows, names))
    return path


def copy_aside(folder: Path) -> None:
    """Copy the table of results beside the study's folder, to which runs of other configs move."""
    aside = find_sibling(folder, "aside")
    aside.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    shutil.copy(folder / RESULTS, aside / f"results-{stamp}.csv")


def read_table(
    path: Path, axes: Sequence[Axis] = (), name: str = "argument `options.recorded`"
) -> dict[frozenset[tuple[str, str]], dict[str, Any]]:
    """Return the ended cells of a table of results by their labels, with the seed.

    The columns up to ``seed`` are labels, ``status`` and ``config_digest`` are texts, and all
    others are numbers. The seed of a row is an integer, as in the row of a folder. Cells that were
    missing, running or stopped are left out.

    Args:
        path: The table; without the file there are no rows.
        axes: The axes of the study; a number in the table, such as 1.0, is also the label 1.
        name: The name of the table in messages.

    Raises:
        StudyError: If the file is no such table.
    """
    if not path.is_file():
        return {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            columns, *cells = [row for row in csv.reader(file) if row] or [[]]
        lines = read_csv(path)
    except (UnicodeDecodeError, csv.Error) as error:
        raise StudyError(
            f"Expected {name} to be a table in UTF-8 but got {path}, which is none"
            f" ({error}): put the original back, or remove it."
        ) from error
    if not {SEED, "status"} <= {*columns}:
        raise StudyError(
            f"Expected {name} to be a table with the columns seed and status but got {path}, which"
            f" has {', '.join(columns) or 'none'}."
        )
    if cut := [number for number, row in enumerate(cells) if len(row) != len(columns)]:
        raise StudyError(
            f"Expected {name} to have {len(columns)} cells in each row but got {len(cells[cut[0]])}"
            f" in row {cut[0]} of {path}: put the original back, or remove it."
        )
    names = columns[: columns.index(SEED) + 1]
    own = {axis.name: axis.labels for axis in axes}
    rows: dict[frozenset[tuple[str, str]], dict[str, Any]] = {}
    for line in lines:
        labels = {axis: match_label(line[axis], own.get(axis, ())) for axis in names}
        texts = {column: line[column] for column in columns if column not in names and line[column]}
        try:
            status = State(texts.pop("status", ""))
            digests = {DIGEST: texts.pop(DIGEST)} if DIGEST in texts else {}
            numbers = {column: _read_number(text) for column, text in texts.items()}
        except ValueError as error:
            raise StudyError(
                f"Expected {name} to have states and numbers of cells but got {error} in {path}:"
                " put the original back, or remove it."
            ) from error
        if status in _ENDED:
            seed = {SEED: _read_seed(line[SEED])}
            row = {**labels, **seed, "status": str(status), **digests, **numbers}
            key = frozenset(labels.items())
            rows[key] = _choose_row(rows.get(key, row), row, name, path)
    return rows


def _choose_row(
    first: dict[str, Any], row: dict[str, Any], name: str, path: Path
) -> dict[str, Any]:
    """Return the row of a cell that has two rows, as in a table merged from two: its result.

    Raises:
        StudyError: If both rows are results, and other ones.
    """
    if str(row) == str(first) or not State(row["status"]).is_result:
        return first
    if not State(first["status"]).is_result:
        return row
    cell = ",".join(f"{axis}={row[axis]}" for axis in list(row)[: list(row).index(SEED) + 1])
    raise StudyError(
        f"Expected {name} to have one row for each cell but got two that differ for {cell} in"
        f" {path}: remove one of them."
    )


def _read_seed(text: str) -> int | str:
    """Return a seed; a text that is none, which is that of no cell, as it is."""
    return int(text) if text.isdecimal() else text


def _read_number(text: str) -> float:
    """Return a number, an integer as such: a table that is written again has the same bytes."""
    return int(text) if text.isdecimal() else float(text)
