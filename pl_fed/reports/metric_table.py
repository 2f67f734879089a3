"""The numbers of ``metrics.csv``, column by column: files may have very many rows."""

import csv
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TextIO

import numpy as np
from numpy.typing import NDArray


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
        texts = dict(zip(names, zip(*rows))) if rows else {}
        texts.pop("", None)
        parsed = {name: _parse_column(column) for name, column in texts.items()}
        damaged_cells = sum(damaged for _, damaged in parsed.values())
        numbers, _ = parsed.pop("round", (np.full(len(rows), np.nan), 0))
        has_round = np.isfinite(numbers)
        own_rounds = [int(number) for number in numbers[has_round].tolist()]
        rounds = sorted(set(own_rounds))
        place_by_round = {round: place for place, round in enumerate(rounds)}
        places = np.array([place_by_round[round] for round in own_rounds], dtype=np.int64)
        columns = {}
        for name, (values, _) in parsed.items():
            own = values[has_round]
            is_value = ~np.isnan(own)
            if is_value.any():
                column = np.full(len(rounds), np.nan)
                column[places[is_value]] = own[is_value]  # the last of equal rounds
                columns[name] = column
        return cls(rounds, columns, len(rows) - len(own_rounds), damaged_cells)

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


def _parse_column(cells: Sequence[str]) -> tuple[NDArray[np.float64], int]:
    """Return the numbers in cells, and the number of damaged cells; NaN without a number."""
    numbers = np.full(len(cells), np.nan)
    if not any(cells):
        return numbers, 0
    with suppress(ValueError):  # fails at the first empty cell
        return np.array(list(map(float, cells))), 0
    filled = [place for place, cell in enumerate(cells) if cell]
    numbers[filled] = [parse_number(cells[place]) for place in filled]
    return numbers, sum(is_damaged(cells[place]) for place in filled)
