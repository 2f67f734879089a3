"""``metrics.csv``: one row per round, on disk before the round's checkpoint."""

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from pl_fed.loggers.waiting_rows import WaitingRows


class RunCSV(Logger):
    """Writes what is logged of a round into one row of ``metrics.csv``.

    What is logged of the same round later (validation, say) goes into the same row. A kill at any
    moment leaves whole rows, and a resumed run goes on where its checkpoint left off.

    Args:
        folder: The run's folder.

    Attributes:
        waiting: Rows that are written before any other, so that rounds keep their order.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.waiting = WaitingRows(self._log)
        self.path = Path(folder) / "metrics.csv"
        self._columns: list[str] = []
        self._row: dict[str, str] = {}  # the current one, which is the last of the file
        self._offset = 0  # where it begins

    @property
    def name(self) -> str:
        """Empty: the run's folder is the logger's."""
        return ""

    @property
    def version(self) -> str:
        """Empty: the run's folder is the logger's."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: ``config.yaml`` has them."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add numbers to the row of a round: of the metric ``round``, or else of the step."""
        self.waiting.write()
        self._log(metrics, step)

    @rank_zero_only
    def _log(self, metrics: Mapping[str, float], step: int | None) -> None:
        if not self._columns:
            self.keep()
        round = str(int(metrics.get("round", step or 0)))
        if self._row.get("round") != round:
            self._row = {"round": round}
            self._offset = self.path.stat().st_size
        values = {k: f"{v:.9g}" for k, v in metrics.items() if k not in ("epoch", "round")}
        self._row |= values
        new = [name for name in values if name not in self._columns]
        if new:
            self._columns += new
            self._replace(_rows(self.path.read_bytes()[: self._offset]))
        else:
            self._write()

    def keep(self, rounds: int | None = None) -> None:
        """Forget all rows but those of the first ``rounds`` rounds: a resumed run goes on there.

        A damaged file, which is a log alone, is kept under another name.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        try:
            rows = _checked_rows(content[: content.rfind(b"\n") + 1])
        except ValueError as error:
            rows = []
            self._set_aside(str(error))
        rows = [row for row in rows if rounds is None or int(row["round"]) < rounds]
        self._columns = list(rows[0]) if rows else ["round"]
        # a checkpoint may lie within the round of the last row, whose validation is still to come
        self._row = {name: value for name, value in rows.pop().items() if value} if rows else {}
        self._replace(rows)

    def _set_aside(self, damage: str) -> None:
        """Rename a damaged file, and say so."""
        for number in range(1, 1000):
            other = self.path.with_name(f"metrics_damaged_{number}.csv")
            if not other.exists():
                break
        os.replace(self.path, other)
        rank_zero_warn(
            f"{self.path} is damaged ({damage}): it is kept as {other.name}, and a new one begins"
            " with the rounds that follow."
        )

    def _replace(self, rows: list[dict[str, str]]) -> None:
        """Write the file anew: these rows, and the current one."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        self._offset = len(text.getvalue().encode())
        if self._row:
            writer.writerow(self._row)
        temporary = self.path.with_suffix(".csv.tmp")
        temporary.write_text(text.getvalue(), encoding="utf-8", newline="")
        os.replace(temporary, self.path)

    def _write(self) -> None:
        """Write the current row in one call."""
        line = io.StringIO(newline="")
        csv.DictWriter(line, self._columns, restval="", lineterminator="\n").writerow(self._row)
        with self.path.open("r+b") as file:
            file.seek(self._offset)
            file.write(line.getvalue().encode())
            file.truncate()


def _checked_rows(content: bytes) -> list[dict[str, str]]:
    """Return the rows of a file.

    Raises:
        ValueError: If this logger cannot have written them.
    """
    try:
        rows = _rows(content)
    except csv.Error as error:
        raise ValueError(str(error)) from error
    columns = list(rows[0]) if rows else ["round"]
    if columns[0] != "round" or not all(name and name.isprintable() for name in columns):
        raise ValueError("its first line does not hold the names of columns")
    for number, row in enumerate(rows):
        if list(row) != columns or None in row.values() or not row["round"].isdecimal():
            raise ValueError(f"row {number} does not fit the columns")
    return rows


def _rows(content: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content.decode(), newline="")))
