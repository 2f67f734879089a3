"""Ranks and Spearman's correlation of them, in NumPy alone: a report loads no torch and no SciPy.

C. Spearman, "The Proof and Measurement of Association between Two Things", American Journal of
Psychology 15, 1904: Pearson's correlation of the ranks.
"""

import numpy as np
from numpy.typing import NDArray


def rank_correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return Spearman's rank correlation; NaN if all values of one are equal.

    Equal values have the mean of their ranks.

    Args:
        first: The values of a quantity, [samples].
        second: The values of another quantity, [samples].

    Example:
        >>> rank_correlation(np.array([1.0, 2.0, 9.0]), np.array([3.0, 4.0, 5.0]))
        1.0
    """
    ranks = [mid_ranks(values) for values in (first, second)]
    deviations = [rank - rank.mean() for rank in ranks]
    scale = float(np.sqrt((deviations[0] ** 2).sum() * (deviations[1] ** 2).sum()))
    return float((deviations[0] * deviations[1]).sum() / scale) if scale else float("nan")


def mid_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ranks from 1 for the smallest value; equal values share the mean of their ranks.

    Args:
        values: The values without NaN, [n]; infinite ones are allowed.

    Example:
        >>> mid_ranks(np.array([3.0, 1.0, 3.0]))
        array([2.5, 1. , 2.5])
    """
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[places.reshape(-1)])
