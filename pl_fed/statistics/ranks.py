"""Ranks of several methods: Friedman's test, Nemenyi's critical difference, and its diagram.

Source: J. Demšar, "Statistical Comparisons of Classifiers over Multiple Data Sets", Journal of
Machine Learning Research 7, 2006, section 3.2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from pl_fed.functional.rank_correlation import mid_ranks
from pl_fed.statistics.draws import split_draws
from pl_fed.statistics.samples import Floats, check_draws, check_scores, check_share

ALPHA = 0.05


def block_ranks(scores: ArrayLike, higher_is_better: bool = True) -> Floats:
    """Return the rank of each method within each block, 1 for the best, [blocks, methods].

    Args:
        scores: One score for each block and method, [blocks, methods]. A block is a seed, a data
            set or a condition. An infinite score is allowed: −∞ ranks a run that diverged last.
        higher_is_better: Whether larger scores are better.

    Raises:
        ValueError: If the table is empty, or a score is NaN.
    """
    table = check_scores(scores, "scores", "blocks", "methods")
    return np.stack([mid_ranks(-row if higher_is_better else row) for row in table])


@dataclass(frozen=True)
class FriedmanTest:
    """Result of Friedman's test.

    Args:
        statistic: Friedman's χ², with the correction for ties.
        p_value: p-value by random permutations of the ranks within blocks.
        chi2_p_value: p-value by the limit for many blocks; too large for few of them.
        f_statistic: The F statistic of Iman and Davenport.
        f_p_value: Its p-value by the F distribution; far too small for three methods and blocks.
        average_ranks: Mean rank of each method, 1 for the best, [methods].
        blocks: Number of blocks.
    """

    statistic: float
    p_value: float
    chi2_p_value: float
    f_statistic: float
    f_p_value: float
    average_ranks: Floats
    blocks: int


def friedman_test(
    scores: ArrayLike, higher_is_better: bool = True, draws: int = 9_999, seed: int = 0
) -> FriedmanTest:
    """Return Friedman's test that no method tends to have other ranks than the others.

    Assumes independent blocks. Several seeds of one data set are not independent of each other as
    evidence about data sets: average them first, or let the seeds of one data set be the blocks.
    ``p_value`` holds its level for any number of blocks. The two other p-values are the usual
    approximations, for comparison with the literature.

    Args:
        scores: One score for each block and method, [blocks, methods]. −∞ ranks a run that diverged
            last, if higher is better.
        higher_is_better: Whether larger scores are better.
        draws: Number m of random permutations. ``p_value`` is (b + 1) / (m + 1) for b of them with
            a statistic that is at least as large.
        seed: Seed of the permutations. Equal arguments give equal numbers.

    Returns:
        The test. If all ranks are equal, all p-values are 1. If all blocks agree on all ranks, the
        F statistic is infinite and its p-value 0.

    Raises:
        ValueError: If there are fewer than two blocks or methods, or a score is NaN.

    Source: M. Friedman, "The Use of Ranks to Avoid the Assumption of Normality Implicit in the
    Analysis of Variance", Journal of the American Statistical Association 32, 1937; R. Iman and J.
    Davenport, "Approximations of the Critical Region of the Friedman Statistic", Communications in
    Statistics 9, 1980.
    """
    check_draws(draws)
    ranks = block_ranks(scores, higher_is_better)
    blocks, methods = ranks.shape
    if blocks < 2 or methods < 2:
        raise ValueError(
            "Expected argument `scores` to have at least two blocks and two methods but got shape"
            f" {list(ranks.shape)}."
        )
    means = ranks.mean(0)
    spread = float(((means - (methods + 1) / 2) ** 2).sum())
    within = float(((ranks - (methods + 1) / 2) ** 2).sum()) / (blocks * (methods - 1))
    if within == 0:
        return FriedmanTest(0.0, 1.0, 1.0, 0.0, 1.0, means, blocks)
    statistic = blocks * spread / within
    remainder = blocks * (methods - 1) - statistic
    f_statistic, f_p_value = math.inf, 0.0
    if remainder > 1e-9 * statistic:
        f_statistic = (blocks - 1) * statistic / remainder
        f_p_value = float(special.fdtrc(methods - 1, (methods - 1) * (blocks - 1), f_statistic))
    return FriedmanTest(
        statistic,
        _permute_ranks(ranks, spread, draws, seed),
        float(special.chdtrc(methods - 1, statistic)),
        f_statistic,
        f_p_value,
        means,
        blocks,
    )


def _permute_ranks(ranks: Floats, spread: float, draws: int, seed: int) -> float:
    """Return the p-value of the spread of the average ranks, by permutations within blocks."""
    generator, extreme = np.random.default_rng(seed), 0
    bound = spread * (1 - 1e-10)  # equal spreads count
    centre = (ranks.shape[1] + 1) / 2
    for size in split_draws(draws, ranks.size):
        copies = np.broadcast_to(ranks, (size, *ranks.shape))
        means = generator.permuted(copies, axis=-1).mean(1)
        extreme += int((((means - centre) ** 2).sum(-1) >= bound).sum())
    return (1 + extreme) / (1 + draws)


def critical_difference(methods: int, blocks: int, alpha: float = ALPHA) -> float:
    """Return Nemenyi's critical difference q √(k (k + 1) / (6 N)) of average ranks.

    q is the quantile of the studentized range with infinite degrees of freedom, divided by √2. The
    limit is for many blocks without ties; for few blocks or many ties, the test is conservative.

    Args:
        methods: Number k of methods, at least 2.
        blocks: Number N of blocks, at least 2.
        alpha: The level for all pairs together, in (0, 1).

    Raises:
        ValueError: If a number is too small, or ``alpha`` is out of range.

    Source: P. Nemenyi, "Distribution-free Multiple Comparisons", PhD thesis, Princeton, 1963.

    Example:
        >>> round(critical_difference(4, 14), 2)  # Demšar's example, section 3.2.4: 1.25
        1.25
    """
    from scipy.stats import studentized_range  # scipy.stats takes long to import

    check_share(alpha, "alpha")
    for name, number in (("methods", methods), ("blocks", blocks)):
        if number < 2:
            raise ValueError(f"Expected argument `{name}` to be at least 2 but got {number}.")
    quantile = float(studentized_range.ppf(1 - alpha, methods, np.inf)) / math.sqrt(2)
    return quantile * math.sqrt(methods * (methods + 1) / (6 * blocks))


@dataclass(frozen=True)
class RankComparison:
    """Comparison of methods by average ranks: the numbers of a critical-difference diagram.

    Args:
        names: Names of the methods, from the best to the worst average rank.
        average_ranks: Their average ranks, 1 for the best, [methods].
        difference: Nemenyi's critical difference.
        groups: Groups of methods that do not differ, as ranges (first, last) of places in
            ``names``: the largest ones, with two methods at least.
        friedman: Friedman's test. Its average ranks are in the order of the scores.
        alpha: The level of the critical difference.
    """

    names: tuple[str, ...]
    average_ranks: Floats
    difference: float
    groups: tuple[tuple[int, int], ...]
    friedman: FriedmanTest
    alpha: float


def compare_ranks(
    scores: ArrayLike,
    names: Sequence[str],
    higher_is_better: bool = True,
    alpha: float = ALPHA,
) -> RankComparison:
    """Return the numbers of a critical-difference diagram.

    Two methods differ if their average ranks are further apart than Nemenyi's critical difference.
    Read the groups only if Friedman's test rejects. Assumptions are those of :func:`friedman_test`
    and :func:`critical_difference`. Whether two methods differ depends on the other methods: for
    one planned comparison, use a paired test.

    Args:
        scores: One score for each block and method, [blocks, methods].
        names: Names of the methods, [methods].
        higher_is_better: Whether larger scores are better.
        alpha: The level, in (0, 1).

    Raises:
        ValueError: If the number of names differs from that of methods, there are fewer than two
            blocks or methods, or a score is NaN.
    """
    friedman = friedman_test(scores, higher_is_better)
    ranks = friedman.average_ranks
    if len(names) != len(ranks):
        raise ValueError(
            f"Expected argument `names` to have {len(ranks)} names, one for each column of"
            f" `scores`, but got {len(names)}."
        )
    order = np.argsort(ranks, kind="stable")
    difference = critical_difference(len(ranks), friedman.blocks, alpha)
    return RankComparison(
        tuple(names[place] for place in order),
        ranks[order],
        difference,
        group_ranks(ranks[order], difference),
        friedman,
        alpha,
    )


def group_ranks(average_ranks: ArrayLike, difference: float) -> tuple[tuple[int, int], ...]:
    """Return the largest groups of at least two methods within a critical difference.

    Args:
        average_ranks: Average ranks in ascending order, [methods].
        difference: The critical difference.

    Returns:
        Ranges (first, last) of places. No range lies within another one.

    Example:
        >>> group_ranks([1.0, 1.5, 2.5, 4.0], 1.5)
        ((0, 2), (2, 3))
    """
    ranks, groups, furthest = np.asarray(average_ranks, dtype=np.float64), [], 0
    for first, rank in enumerate(ranks):
        last = int(np.searchsorted(ranks, rank + difference + 1e-12, side="right")) - 1
        if last > max(first, furthest):
            groups.append((first, last))
            furthest = last
    return tuple(groups)
