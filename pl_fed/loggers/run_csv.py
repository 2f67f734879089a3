"""``metrics.csv``: one row per round, on disk before the round's checkpoint."""

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class RunCSV(Logger):
    """Writes what is logged of a round into one row of ``metrics.csv``.

    What is logged of the same round later (validation, say) goes into the same row. A kill at any
    moment leaves whole rows, and a resumed run goes on where its checkpoint left off.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.path = Path(folder) / "metrics.csv"
        self._columns: list[str] = ["round"]
        self._row: dict[str, str] = {}
        self._offset = 0

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

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add numbers to the row of a round."""
        round = str(step or 0)
        if self._row.get("round") != round:
            self._row = {"round": round}
            self._offset = self.path.stat().st_size if self.path.exists() else 0
        values = {k: f"{v:.9g}" for k, v in metrics.items() if k not in ("epoch", "round")}
        self._row |= values
        new = [name for name in values if name not in self._columns]
        if new or self._offset == 0:
            self._columns += new
            self._rewrite()
        self._write()

    def keep(self, rounds: int) -> None:
        """Forget all rows but those of the first ``rounds`` rounds: a resumed run goes on there."""
        if not self.path.exists():
            return
        text = self.path.read_text()
        rows = list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))
        self._columns = list(rows[0]) if rows else ["round"]
        self._row = {}
        self._replace([row for row in rows if int(row["round"]) < rounds])

    def _rewrite(self) -> None:
        """Write the rows before the current one anew, with the columns as they are now."""
        rows = []
        if self._offset:
            with self.path.open(newline="") as file:
                rows = list(csv.DictReader(io.StringIO(file.read(self._offset))))
        self._replace(rows)

    def _replace(self, rows: list[dict[str, str]]) -> None:
        temporary = self.path.with_suffix(".csv.tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self.path)
        self._offset = self.path.stat().st_size

    def _write(self) -> None:
        """Write the current row in one call; it never gets shorter."""
        line = io.StringIO()
        csv.DictWriter(line, self._columns, restval="", lineterminator="\n").writerow(self._row)
        with self.path.open("r+b") as file:
            file.seek(self._offset)
            file.write(line.getvalue().encode())
