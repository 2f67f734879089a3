"""Spearman's rank correlation.

C. Spearman, "The Proof and Measurement of Association between Two Things", American Journal of
Psychology 15, 1904: Pearson's correlation of the ranks.
"""

import numpy as np
from numpy.typing import NDArray

from pl_fed.statistics.ranks import mid_ranks


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
