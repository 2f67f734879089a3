"""The numbers of ``metrics.csv``, column by column: files may have very many rows."""

import csv
import io
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

_MAX_ROUND = 2**53  # integers below it are exact as float64
_VALIDATION = "val/"
_PLAIN = b"0123456789+-.einfa,\r\n"  # the letters of numbers, of nan and inf, and of lines


class LastCell(NamedTuple):
    """Last cell: the last value of a metric in a file.

    Attributes:
        row: Its row, from 0.
        round: The round of the row.
        value: The value.
    """

    row: int
    round: int
    value: float


@dataclass(frozen=True)
class MetricTable:
    """Metric table: the values of each metric by round.

    Attributes:
        rounds: The rounds, in ascending order and without repetition.
        columns: The values of each metric, [rounds]; NaN in rounds without a value. Each metric has
            a value in some round.
        damaged_rows: Number of rows without a round, or cut by the end of the file, which are left
            out.
        damaged_cells: Number of cells with a text that is not a number, which are left out.
        last_cells: The last value of each metric in the file. A test of an earlier round follows
            the rows of later rounds.
        ends_empty: Whether the last row of the file has a round, but no number.
    """

    rounds: Sequence[int]
    columns: Mapping[str, NDArray[np.float64]]
    damaged_rows: int = 0
    damaged_cells: int = 0
    last_cells: Mapping[str, LastCell] = field(default_factory=dict)
    ends_empty: bool = False

    @classmethod
    def read(cls, file: TextIO) -> "MetricTable":
        """Read a CSV file with a column ``round``; rows of one round are joined.

        Of two validations in rows of one round, that of the row with a trained round counts.

        A last row without the end of its line was cut, so that its last number may be another one.
        """
        text, cut_rows = _drop_cut_row(file.read())
        names, values, damaged_cells = _read_cells(text)
        num_rows = values.shape[1]
        place_by_name = {name: place for place, name in enumerate(names)}  # the last of equal ones
        place_of_round = place_by_name.pop("round", None)
        place_by_name.pop("", None)
        numbers = np.full(num_rows, np.nan) if place_of_round is None else values[place_of_round]
        has_round = np.abs(numbers) < _MAX_ROUND  # also false for NaN
        rounds, places = np.unique(numbers[has_round].astype(np.int64), return_inverse=True)
        is_in_order = len(rounds) == num_rows and bool((places[1:] > places[:-1]).all())
        has_value = ~np.isnan(values)
        place_of_time = place_by_name.get("time/round")
        is_trained = has_round if place_of_time is None else has_value[place_of_time]
        columns, last_cells = {}, {}
        for name, place in place_by_name.items():
            if (is_value := has_value[place] & has_round).any():
                row = num_rows - 1 - int(is_value[::-1].argmax())
                last_cells[name] = LastCell(row, int(numbers[row]), float(values[place, row]))
                column = values[place]
                if not is_in_order:
                    column = np.full(len(rounds), np.nan)
                    # a validation behind the fit, as of a checkpoint, is not that of its round
                    is_own = is_value & is_trained if name.startswith(_VALIDATION) else is_value
                    for cells in (is_value, is_own):
                        column[places[cells[has_round]]] = values[place, cells]  # the last one
                columns[name] = column
        last_row = int(np.flatnonzero(has_round)[-1]) if len(places) else -1
        return cls(
            rounds.tolist(),
            columns,
            num_rows - len(places) + cut_rows,
            damaged_cells,
            last_cells,
            ends_empty=last_row > max((cell.row for cell in last_cells.values()), default=-1),
        )

    @cached_property
    def rows(self) -> dict[int, dict[str, float]]:
        """The numbers by round and metric; rounds without a number are empty."""
        rows: dict[int, dict[str, float]] = {round: {} for round in self.rounds}
        for name in self.columns:
            for round, value in self.curve(name).items():
                rows[round][name] = value
        return rows

    def curve(self, metric: str) -> dict[int, float]:
        """Return a metric by round, without rounds that lack it."""
        column = self.columns.get(metric)
        if column is None:
            return {}
        places = (~np.isnan(column)).nonzero()[0]
        return dict(zip([self.rounds[place] for place in places.tolist()], column[places].tolist()))

    def finite_points(self, metric: str) -> tuple[list[int], list[float]]:
        """Return the rounds with a finite value of a metric, and these values."""
        column = self.columns.get(metric)
        if column is None:
            return [], []
        is_finite = np.isfinite(column)
        return list(compress(self.rounds, is_finite.tolist())), column[is_finite].tolist()

    def last(self, metric: str) -> tuple[int, float]:
        """Return the last value of a metric in the file, behind its round."""
        return self.last_cells[metric][1:]


def _drop_cut_row(text: str) -> tuple[str, int]:
    """Return a CSV text without a row that the end of the file cuts, and the number of such rows.

    Example:
        >>> _drop_cut_row("round,a" + chr(10) + "0,0.")[1]
        1
    """
    complete, end, cut = text.rpartition("\n")
    return (complete + end, 1) if end and cut.strip() and not cut.endswith("\r") else (text, 0)


def _read_cells(text: str) -> tuple[list[str], NDArray[np.float64], int]:
    """Return the names, the numbers and the number of damaged cells of a CSV text.

    Args:
        text: The text. Its rows may have fewer or more cells than the header, as those of a killed
            process.

    Returns:
        The names of the columns; the numbers, [columns, rows], with NaN in cells without a number;
        and the number of cells with a text that is not a number.
    """
    header, _, body = text.partition("\n")
    header = header.removesuffix("\r")
    if "\r" not in header and '"' not in header:  # the header is the first line
        names = next(csv.reader([header]), [])
        if (numbers := _parse_plain_rows(body, len(names))) is not None:
            return names, numbers, 0
    reader = csv.reader(io.StringIO(text, newline=""))
    names = next(reader, [])
    rows = [row for row in reader if row]
    if any(len(row) != len(names) for row in rows):
        rows = [(row + [""] * len(names))[: len(names)] for row in rows]
    table, damaged_cells = parse_cells(rows, names)
    return names, table, damaged_cells


def _parse_plain_rows(text: str, num_columns: int) -> NDArray[np.float64] | None:
    """Return the numbers of rows by one call, several times as fast as cell by cell.

    Args:
        text: The rows, without the header.
        num_columns: The number of columns.

    Returns:
        The numbers, [columns, rows], as :func:`parse_cells` would return them; ``None`` for a text
        with other cells than plain numbers and empty ones, or with too many cells in a row.
    """
    if not text.isascii() or text.encode().translate(None, _PLAIN):
        return None
    rows = [line.rstrip(",") for line in text.splitlines() if line]
    lengths = np.array([row.count(",") + 1 if row else 0 for row in rows], dtype=np.int64)
    if not lengths.any() or lengths.max() > num_columns:
        return None
    cells = f",{','.join(filter(None, rows))},".replace(",,", ",nan,").replace(",,", ",nan,")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy warns of a text that is no number
            numbers = np.fromstring(cells[1:-1], sep=",")
    except (ValueError, DeprecationWarning):
        return None
    table = np.full((num_columns, len(rows)), np.nan)
    table.T[np.arange(num_columns) < lengths[:, np.newaxis]] = numbers
    return table


def parse_number(text: str | None) -> float:
    """Return the number in a cell, or NaN if it has none."""
    try:
        return float(text or "nan")
    except (TypeError, ValueError):
        return math.nan


def is_damaged(text: object) -> bool:
    """Return whether a cell holds text that is not a number."""
    if not isinstance(text, str) or not text:
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False


def parse_cells(
    rows: Sequence[Sequence[str]], names: Sequence[str], texts: Collection[str] = ("",)
) -> tuple[NDArray[np.float64], int]:
    """Return the numbers in a table, and the number of damaged cells.

    Args:
        rows: The cells of each row, as many as columns.
        names: The names of the columns.
        texts: The names of columns that may hold texts.

    Returns:
        The numbers, [columns, rows], with NaN in cells without a number; and the number of cells
        with a text that is not a number, outside the columns of texts.
    """
    table = np.empty((len(names), len(rows)))
    if not rows:
        return table, 0
    damaged = 0
    for place, cells in enumerate(zip(*rows)):
        try:
            table[place] = [float(cell) if cell else math.nan for cell in cells]
        except ValueError:
            table[place] = [parse_number(cell) for cell in cells]
            damaged += 0 if names[place] in texts else sum(map(is_damaged, cells))
    return table, damaged
