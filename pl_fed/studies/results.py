"""Results of a study: one row for each cell."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pl_fed.studies.cell_folder import iterate_numbers, write_text
from pl_fed.studies.inspection import CellStatus
from pl_fed.text import csv_cell

RESULTS = "results.csv"
"""Name of the table in a study's folder."""

_OF_A_MACHINE = ("seconds/", "processes")  # columns that a repeated run may change
_PARTS = ("metrics", "counts", "seconds")


def make_row(status: CellStatus) -> dict[str, Any]:
    """Return the row of a cell: its labels, its seed, its state and all numbers of its summary.

    A cell without a result has no numbers. Metrics are named like ``test/personal/accuracy``,
    others ``counts/…`` and ``seconds/…``.
    """
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
