"""Results of a study: one row for each cell."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pl_fed.studies.cell_folder import State, iterate_numbers, write_text
from pl_fed.studies.inspection import CellStatus
from pl_fed.studies.readers import refuse
from pl_fed.studies.selection import SEED
from pl_fed.text import csv_cell

RESULTS = "results.csv"
"""Name of the table in a study's folder."""

_OF_A_MACHINE = ("seconds/", "processes")  # columns that a repeated run may change
_PARTS = ("metrics", "counts", "seconds")


def make_row(status: CellStatus) -> dict[str, Any]:
    """Return the row of a cell: its labels, its seed, its state and all numbers of its summary.

    A cell without a result has no numbers. Metrics are named like ``test/personal/accuracy``,
    others ``counts/…`` and ``seconds/…``. A recorded cell has the row of its table.
    """
    if status.state is State.RECORDED:
        return dict(status.row)
    labels = {**status.cell.values, "seed": status.cell.seed, "status": str(status.state)}
    if not status.state.is_result:
        return labels
    summary = status.folder.read_summary()
    numbers: dict[str, Any] = {}
    for part in _PARTS:
        values = summary.get(part)
        prefix = "" if part == "metrics" else f"{part}/"
        numbers |= dict(iterate_numbers(values, prefix) if isinstance(values, Mapping) else ())
    return {**labels, **numbers}


def write_results(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write the table of results, without the times, and return its path.

    Equal cells give equal bytes, also after a stop.
    """
    columns = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in columns if not name.startswith(_OF_A_MACHINE)]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {name: csv_cell(item) if isinstance(item, str) else item for name, item in row.items()}
        )
    path = folder / RESULTS
    write_text(path, text.getvalue())
    return path


def read_table(path: Path) -> dict[tuple[tuple[str, str], ...], dict[str, Any]]:
    """Return the rows of a table of results by the labels of their cells, with the seed.

    The columns up to ``seed`` are labels, ``status`` is a text, and all others are numbers.

    Args:
        path: The table; without the file there are no rows.

    Raises:
        StudyError: If the file is no such table.
    """
    if not path.is_file():
        return {}
    rows = {}
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        names = list(reader.fieldnames or ())
        if not {SEED, "status"} <= {*names}:
            got = f"{path}, which has {', '.join(names) or 'none'}"
            refuse("options.recorded", "be a table with the columns seed and status", got)
        axes = names[: names.index(SEED) + 1]
        for line in reader:
            labels = {axis: str(line[axis]).removeprefix("'") for axis in axes}
            numbers = {name: text for name, text in line.items() if name not in axes and text}
            status = numbers.pop("status")
            numbers = {name: float(text) for name, text in numbers.items()}
            rows[tuple(labels.items())] = {**labels, "status": status, **numbers}
    return rows
