"""Effect sizes: the amount of a difference, apart from the number of runs that shows it."""

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from pl_fed.functional.rank_correlation import mid_ranks
from pl_fed.statistics.intervals import compute_deviation, compute_mean
from pl_fed.statistics.paired_tests import paired_differences
from pl_fed.statistics.samples import check_sample


def cohens_d(first: ArrayLike, second: ArrayLike, corrected: bool = True) -> float:
    """Return the paired d_z: the mean difference in units of the differences' deviation.

    Assumes independent pairs. d_z grows with the correlation of the two methods, so it is not to be
    compared with the d of two independent samples. Its estimate is too large for few pairs, by 25 %
    for n = 5. Hedges' factor J(n − 1) corrects this for normal differences.

    Args:
        first: Results of the first method, [pairs].
        second: Results of the second method on the same seeds, [pairs].
        corrected: Whether to multiply by J(f) = Γ(f / 2) / (√(f / 2) Γ((f − 1) / 2)).

    Returns:
        d_z; NaN for a single pair, and for two pairs with the correction, where J is 0. Equal
        differences other than 0 give ±∞, and no difference 0.

    Raises:
        ValueError: If the numbers of values differ, or a value is not finite.

    Source: J. Cohen, "Statistical Power Analysis for the Behavioral Sciences", second edition,
    1988, section 2.3.5; L. Hedges, "Distribution Theory for Glass's Estimator of Effect Size",
    Journal of Educational Statistics 6, 1981, equation 6d.

    Example:
        >>> cohens_d([1.0, 2.0, 3.0], [0.0, 0.0, 0.0], corrected=False)
        2.0
    """
    differences = paired_differences(first, second)
    freedom, mean = len(differences) - 1, compute_mean(differences)
    if freedom < 1:
        return math.nan
    deviation = compute_deviation(differences)
    if deviation == 0:
        return math.copysign(math.inf, mean) if mean else 0.0
    if not corrected:
        return mean / deviation
    if freedom == 1:
        return math.nan
    gammas = special.gammaln(freedom / 2) - special.gammaln((freedom - 1) / 2)
    return mean / deviation * float(np.exp(gammas)) / math.sqrt(freedom / 2)


def rank_biserial(first: ArrayLike, second: ArrayLike) -> float:
    """Return the matched-pairs rank-biserial correlation (W⁺ − W⁻) / (W⁺ + W⁻), in [−1, 1].

    It is the effect size of Wilcoxon's test: 1 if the first method is larger in every pair that
    differs. Its sign can differ from that of the mean difference. Pairs without a difference are
    left out, so it says nothing about their share.

    Args:
        first: Results of the first method, [pairs].
        second: Results of the second method on the same seeds or clients, [pairs].

    Returns:
        The correlation; 0 without any difference.

    Raises:
        ValueError: If the numbers of values differ, or a value is not finite.

    Source: D. Kerby, "The Simple Difference Formula: An Approach to Teaching Nonparametric
    Correlation", Comprehensive Psychology 3, 2014.

    Example:
        >>> rank_biserial([1, 0, 3], [0, 2, 0])  # ranks 1, −2 and 3
        0.3333333333333333
    """
    differences = paired_differences(first, second)
    differences = differences[differences != 0]
    if not len(differences):
        return 0.0
    ranks = mid_ranks(np.abs(differences))
    return float((np.sign(differences) * ranks).sum() / ranks.sum())


def cliffs_delta(first: ArrayLike, second: ArrayLike) -> float:
    """Return Cliff's δ = P(X > Y) − P(X < Y) of two independent samples, in [−1, 1].

    It uses the order alone. It is not for pairs of the same seeds, because it compares each run of
    the first method with all runs of the second one.

    Args:
        first: Results of the first method, [n].
        second: Results of the second method, [m].

    Raises:
        ValueError: If a sample is empty or not finite.

    Source: N. Cliff, "Dominance Statistics: Ordinal Analyses to Answer Ordinal Questions",
    Psychological Bulletin 114, 1993.

    Example:
        >>> cliffs_delta([1, 2, 3], [0, 2])
        0.5
    """
    x, y = check_sample(first, "first"), np.sort(check_sample(second, "second"))
    above = np.searchsorted(y, x, side="left").sum()
    below = (len(y) - np.searchsorted(y, x, side="right")).sum()
    return float(above - below) / (len(x) * len(y))


def probability_of_superiority(first: ArrayLike, second: ArrayLike) -> float:
    """Return P(X > Y) + P(X = Y) / 2 of two independent samples: (δ + 1) / 2, in [0, 1].

    It is the chance that a run of the first method has a larger result than a run of the second
    one. It is not for pairs of the same seeds.

    Args:
        first: Results of the first method, [n].
        second: Results of the second method, [m].

    Raises:
        ValueError: If a sample is empty or not finite.

    Source: A. Vargha and H. Delaney, "A Critique and Improvement of the CL Common Language Effect
    Size Statistics of McGraw and Wong", Journal of Educational and Behavioral Statistics 25, 2000.

    Example:
        >>> probability_of_superiority([1, 2, 3], [0, 2])
        0.75
    """
    return (cliffs_delta(first, second) + 1) / 2
