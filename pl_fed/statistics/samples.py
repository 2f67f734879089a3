"""Checks of samples: finite numbers in arrays of the expected shape."""

import math
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
_DIGITS = 10  # of a difference: results have about five, and equal steps must stay ties


class Uniforms(Protocol):
    """Source of random numbers, such as ``numpy.random.Generator``."""

    def random(self, size: tuple[int, ...]) -> NDArray[np.floating]:
        """Return numbers that are uniform on [0, 1), of the given shape."""
        ...  # pragma: no cover


def check_sample(values: ArrayLike, name: str = "values", fewest: int = 1) -> Floats:
    """Return a sample as an array, float64 [n].

    Args:
        values: The sample.
        name: The argument's name in messages.
        fewest: The smallest allowed number of values.

    Raises:
        ValueError: If there are fewer values, another shape, or values that are not finite.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or len(sample) < fewest:
        expected = f"at least {fewest} number{'s' if fewest > 1 else ''} in one dimension"
        raise ValueError(
            f"Expected argument `{name}` to be {expected} but got shape {list(sample.shape)}."
        )
    check_finite(sample, name)
    return sample


def check_scores(scores: ArrayLike, name: str, rows: str, columns: str) -> Floats:
    """Return a table of scores as an array, float64 [rows, columns].

    Args:
        scores: The table.
        name: The argument's name in messages.
        rows: The meaning of a row in messages, such as ``"seeds"``.
        columns: The meaning of a column.

    Raises:
        ValueError: If the table has another shape or is empty, or a score is NaN.
    """
    table = np.asarray(scores, dtype=np.float64)
    if table.ndim != 2 or not table.size:
        raise ValueError(
            f"Expected argument `{name}` to be of shape [{rows}, {columns}] with at least one"
            f" score but got shape {list(table.shape)}."
        )
    if np.isnan(table).any():
        row, column = np.argwhere(np.isnan(table))[0]
        raise ValueError(
            f"Expected argument `{name}` without NaN but got NaN in row {row}, column {column}, as"
            " of a run that diverged. Leave its row out for all groups, or replace it by a number"
            " that counts as its result, for example the accuracy of chance."
        )
    return table


def check_finite(values: Floats, name: str) -> None:
    """Raise a ``ValueError`` if a value is infinite or NaN."""
    if not np.isfinite(values).all():
        place = np.argwhere(~np.isfinite(values))[0].tolist()
        raise ValueError(
            f"Expected argument `{name}` to be finite but got {values[tuple(place)]} at place"
            f" {', '.join(map(str, place))}, as of a run that diverged. Leave its seed out of all"
            " groups, or replace it by a number that counts as its result, for example the accuracy"
            " of chance."
        )


def check_pairs(first: ArrayLike, second: ArrayLike) -> tuple[Floats, Floats]:
    """Return two samples of equal length, float64 [pairs] each.

    Raises:
        ValueError: If the lengths differ, or a sample is empty or not finite.
    """
    samples = check_sample(first, "first"), check_sample(second, "second")
    if len(samples[0]) != len(samples[1]):
        raise ValueError(
            "Expected arguments `first` and `second` to be pairs of equal number but got"
            f" {len(samples[0])} and {len(samples[1])} values."
        )
    return samples


def check_share(value: float, name: str) -> None:
    """Raise a ``ValueError`` unless a number lies strictly between 0 and 1."""
    if not 0 < value < 1:
        raise ValueError(f"Expected argument `{name}` to be in (0, 1) but got {value}.")


def check_draws(draws: int) -> None:
    """Raise a ``ValueError`` without a random draw."""
    if draws < 1:
        raise ValueError(f"Expected argument `draws` to be at least 1 but got {draws}.")


def subtract_pairs(first: Floats, second: Floats) -> Floats:
    """Return ``first − second`` without the rounding errors of the subtraction.

    0.3 − 0.2 and 0.2 − 0.1 differ in the last bit, which would break ties between ranks.
    A difference is rounded to 10⁻¹⁰ of the larger value of its pair (its next power of ten).
    """
    return np.array([_subtract(*pair) for pair in zip(first.tolist(), second.tolist())])


def _subtract(first: float, second: float) -> float:
    """Return ``first − second`` without the rounding error of the subtraction."""
    largest = max(abs(first), abs(second))
    if largest == 0:
        return 0.0
    return round(first - second, _DIGITS - math.ceil(math.log10(largest))) + 0.0  # no −0
