"""``metrics.csv``: one row per round, on disk before the round's checkpoint."""

import csv
import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from pl_fed.files import replace_file
from pl_fed.loggers.waiting_rows import WaitingRows

_TEST = "test/"


def refuse_shared_file(loggers: Iterable[Logger], folder: Path) -> None:
    """Refuse a CSV logger of Lightning that writes the ``metrics.csv`` of a run, too.

    Args:
        loggers: The loggers of the user.
        folder: The run's folder.

    Raises:
        ValueError: If there is one.
    """
    folder = folder.resolve()
    for logger in loggers:
        if not isinstance(logger, CSVLogger):
            continue
        is_near = Path(logger.root_dir).resolve() in (folder, folder.parent)
        if is_near and Path(logger.log_dir).resolve() == folder:
            raise ValueError(
                "Expected argument `trainer.logger` with a CSVLogger in another folder than that of"
                f" the run but got {folder}, whose metrics.csv pl_fed writes itself: leave the"
                " logger out, or give it a `name`."
            )


class RunCSV(Logger):
    """CSV logger: one row of ``metrics.csv`` for each round.

    Metrics logged later for the same round, such as a validation, go into the same row. An
    undefined number, NaN, is an empty cell. A killed run leaves complete rows, and a resumed run
    continues after the round of its checkpoint.

    Args:
        folder: The run's folder.

    Attributes:
        waiting: Delayed rows, written before any new row so that rounds keep their order.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.waiting = WaitingRows(self._log)
        self.path = Path(folder) / "metrics.csv"
        self._columns: list[str] = []
        self._row: dict[str, str] = {}  # the current row, the last of the file
        self._offset = 0  # the position of its first byte

    @property
    def name(self) -> str:
        """An empty string: the logger writes to the run's folder itself."""
        return ""

    @property
    def version(self) -> str:
        """An empty string: the logger writes to the run's folder itself."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self.path.parent)

    @property
    def experiment(self) -> Any:
        """An object whose methods do nothing: a module may draw where no logger of its is set."""
        return DummyLogger().experiment

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: ``config.yaml`` has the hyperparameters."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add metrics to the row of a round.

        Args:
            metrics: The metrics; ``round`` is the number of the round.
            step: The number of the round if ``metrics`` lacks it.
        """
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
        values = {k: _format(v) for k, v in metrics.items() if k not in ("epoch", "round")}
        self._row |= values
        new_columns = [name for name in values if name not in self._columns]
        if new_columns:
            self._columns += new_columns
            self._replace(_rows(self.path.read_bytes()[: self._offset]))
        else:
            self._write()

    def keep(self, rounds: int | None = None, warns: bool = False) -> None:
        """Keep only the rows of the first rounds, without tests, as a resumed run needs.

        A test of one of these rounds, such as the best one, is outdated once the run goes on. A
        damaged file is renamed, not refused, because it is only a log. A warning tells of rounds
        whose rows are lost.

        Args:
            rounds: The number of rounds to keep; ``None`` keeps all.
            warns: Whether to warn if the last of these rounds has no row.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        try:
            rows = _read_rows(content[: content.rfind(b"\n") + 1])
        except ValueError as error:
            rows, warns = [], False
            self._set_aside(str(error))
        if rounds is not None:
            last = max((int(row["round"]) for row in rows), default=-1)
            if warns and last < rounds - 1:
                rank_zero_warn(
                    f"{self.path} has no rows of rounds {last + 1} to {rounds - 1}, which the run's"
                    " checkpoint has: they are lost, and new rows follow."
                )
            rows = list(_drop_tests(row for row in rows if int(row["round"]) < rounds))
        self._columns = list(rows[0]) if rows else ["round"]
        # a checkpoint may precede the validation of its round, the last row
        self._row = {name: value for name, value in rows.pop().items() if value} if rows else {}
        self._replace(rows)

    def _set_aside(self, damage: str) -> None:
        """Rename a damaged file, and warn."""
        for number in range(1, 1000):
            backup = self.path.with_name(f"metrics_damaged_{number}.csv")
            if not backup.exists():
                break
        os.replace(self.path, backup)
        rank_zero_warn(
            f"{self.path} is damaged ({damage}): it is kept as {backup.name}, and a new file begins"
            " with the next rounds."
        )

    def _replace(self, rows: list[dict[str, str]]) -> None:
        """Replace the file by some rows and the current row."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        self._offset = len(text.getvalue().encode())
        if self._row:
            writer.writerow(self._row)
        with replace_file(self.path) as temporary:
            temporary.write_text(text.getvalue(), encoding="utf-8", newline="")

    def _write(self) -> None:
        """Write the current row in one call."""
        line = io.StringIO(newline="")
        csv.DictWriter(line, self._columns, restval="", lineterminator="\n").writerow(self._row)
        with self.path.open("r+b") as file:
            file.seek(self._offset)
            file.write(line.getvalue().encode())
            file.truncate()


def _format(value: float) -> str:
    """Return a number as text; an undefined one, NaN, is an empty cell."""
    return "" if math.isnan(value) else f"{value:.9g}"


def _drop_tests(rows: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Yield rows without the results of tests; rows that have no other result are left out."""
    for row in rows:
        tested = {name: "" for name, value in row.items() if value and name.startswith(_TEST)}
        untested = {**row, **tested}
        if not tested or any(v for name, v in untested.items() if name != "round"):
            yield untested


def _read_rows(content: bytes) -> list[dict[str, str]]:
    """Return the rows of a file.

    Raises:
        ValueError: If this logger cannot have written the file.
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
