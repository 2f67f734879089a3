"""The numbers of ``metrics.csv``, column by column: files may have very many rows."""

import csv
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

_MAX_ROUND = 2**53  # integers below it are exact as float64


@dataclass(frozen=True)
class MetricTable:
    """Metric table: the values of each metric by round.

    Attributes:
        rounds: The rounds, in ascending order and without repetition.
        columns: The values of each metric, [rounds]; NaN in rounds without a value. Each metric has
            a value in some round.
        damaged_rows: Number of rows without a round, which are left out.
        damaged_cells: Number of cells with a text that is not a number, which are left out.
    """

    rounds: Sequence[int]
    columns: Mapping[str, NDArray[np.float64]]
    damaged_rows: int = 0
    damaged_cells: int = 0

    @classmethod
    def read(cls, file: TextIO) -> "MetricTable":
        """Read a CSV file with a column ``round``; rows of one round are joined."""
        reader = csv.reader(file)
        names = next(reader, [])
        rows = [row for row in reader if row]
        if any(len(row) != len(names) for row in rows):  # of a killed process, for example
            rows = [(row + [""] * len(names))[: len(names)] for row in rows]
        values, damaged_cells = parse_cells(rows, names)
        place_by_name = {name: place for place, name in enumerate(names)}  # the last of equal ones
        place_of_round = place_by_name.pop("round", None)
        place_by_name.pop("", None)
        numbers = np.full(len(rows), np.nan) if place_of_round is None else values[place_of_round]
        has_round = np.abs(numbers) < _MAX_ROUND  # also false for NaN
        rounds, places = np.unique(numbers[has_round].astype(np.int64), return_inverse=True)
        is_in_order = len(rounds) == len(rows) and bool((places[1:] > places[:-1]).all())
        has_value = ~np.isnan(values)
        columns = {}
        for name, place in place_by_name.items():
            if (is_value := has_value[place] & has_round).any():
                column = values[place]
                if not is_in_order:
                    column = np.full(len(rounds), np.nan)
                    column[places[is_value[has_round]]] = values[place, is_value]  # the last one
                columns[name] = column
        return cls(rounds.tolist(), columns, len(rows) - int(has_round.sum()), damaged_cells)

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
        """Return the last round with a value of a metric, and the value."""
        column = self.columns[metric]
        place = int((~np.isnan(column)).nonzero()[0][-1])
        return self.rounds[place], float(column[place])

    @cached_property
    def names_of_last_round(self) -> list[str]:
        """The metrics with a value in the last round."""
        if not self.rounds:
            return []
        return [name for name, column in self.columns.items() if not math.isnan(column[-1])]


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
