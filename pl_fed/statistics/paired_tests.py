"""Paired tests of two methods on the same seeds or clients. All of them are two-sided.

The unit of a pair must be independent of the others. Seeds are: each draws its own clients,
initial weights and cohorts. The clients of one seed are not, because they share a global model. A
test over clients is therefore about the runs at hand, and :class:`pl_fed.statistics.Pairs` reduces
clients to seeds for a statement about further runs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from pl_fed.functional.rank_correlation import mid_ranks
from pl_fed.statistics.draws import split_draws
from pl_fed.statistics.intervals import compute_deviation, compute_mean
from pl_fed.statistics.samples import (
    Floats,
    Uniforms,
    check_draws,
    check_finite,
    check_pairs,
    subtract_pairs,
)

LARGEST_EXACT_WILCOXON = 50  # pairs: 2⁵⁰ signs are counted exactly in float64
LARGEST_EXACT_FLIPS = 30  # pairs: two halves of 2¹⁵ signs
_TOLERANCE = 1e-10  # relative, for statistics that are equal but for rounding


@dataclass(frozen=True)
class PairedTest:
    """Result of a paired test.

    Args:
        statistic: The test's statistic, above 0 if the first method tends to be larger.
        p_value: The two-sided p-value in [0, 1], without a correction; NaN if there is no test.
        pairs: Number of pairs in the test.
        exact: Whether the p-value is that of the exact distribution under the null hypothesis.
    """

    statistic: float
    p_value: float
    pairs: int
    exact: bool


def paired_differences(first: ArrayLike, second: ArrayLike) -> Floats:
    """Return the differences of pairs, without the rounding errors of the subtraction, [pairs].

    Args:
        first: Results of the first method, [pairs].
        second: Results of the second method on the same seeds or clients, [pairs].

    Raises:
        ValueError: If the numbers of values differ, or a value is not finite.

    Example:
        >>> paired_differences([0.3, 0.2], [0.2, 0.1])
        array([0.1, 0.1])
    """
    return subtract_pairs(*check_pairs(first, second))


def paired_t_test(first: ArrayLike, second: ArrayLike) -> PairedTest:
    """Return the paired t-test of equal means.

    Assumes independent pairs, whose differences have a normal distribution. It is not for the
    clients of one run, and not for differences that take few values: equal differences other than
    0 give a p-value of 0 even for two pairs, as the limit of the formula.

    Args:
        first: Results of the first method, [pairs].
        second: Results of the second method on the same seeds, [pairs].

    Returns:
        The test with t = √n · mean / s. Its p-value is 1 without any difference, and NaN for a
        single pair.

    Raises:
        ValueError: If the numbers of values differ, or a value is not finite.

    Source: Student, "The Probable Error of a Mean", Biometrika 6, 1908.

    Example:
        >>> round(paired_t_test([1.0, 2.0, 3.0], [0.0, 0.0, 0.0]).p_value, 4)
        0.0742
    """
    differences = paired_differences(first, second)
    number, mean = len(differences), compute_mean(differences)
    if number < 2:
        return PairedTest(math.nan, math.nan, number, exact=True)
    deviation = compute_deviation(differences)
    if deviation == 0:
        statistic = math.copysign(math.inf, mean) if mean else 0.0
        return PairedTest(statistic, 0.0 if mean else 1.0, number, exact=True)
    statistic = mean / (deviation / math.sqrt(number))
    p_value = 2 * float(special.stdtr(number - 1, -abs(statistic)))
    return PairedTest(statistic, p_value, number, exact=True)


def wilcoxon_test(
    first: ArrayLike, second: ArrayLike, exact_up_to: int = LARGEST_EXACT_WILCOXON
) -> PairedTest:
    """Return Wilcoxon's signed-rank test of differences that are symmetric about 0.

    Assumes independent pairs. It needs no normal distribution, and with fewer than six pairs, no
    p-value is below 0.05. A skewed distribution of differences with a mean of 0 is not symmetric:
    it is rejected too often. Differences of 0 are left out (Wilcoxon's way), and equal absolute
    differences share the mean of their ranks.

    Args:
        first: Results of the first method, [pairs].
        second: Results of the second method on the same seeds or clients, [pairs].
        exact_up_to: Largest number of differences other than 0 for an exact p-value, at most 50.

    Returns:
        The test with the statistic W⁺ − W⁻, the sum of the signed ranks. Its sign can differ from
        that of the mean difference. An exact p-value is exact with ties, too. Otherwise it is that
        of the normal distribution with the variance for ties. Without any difference it is 1.

    Raises:
        ValueError: If the numbers of values differ, a value is not finite, or ``exact_up_to`` is
            above 50.

    Source: F. Wilcoxon, "Individual Comparisons by Ranking Methods", Biometrics Bulletin 1, 1945.

    Example:
        >>> wilcoxon_test([1, 2, 3, 4, 5], [0, 0, 0, 0, 0])
        PairedTest(statistic=15.0, p_value=0.0625, pairs=5, exact=True)
    """
    if exact_up_to > LARGEST_EXACT_WILCOXON:
        raise ValueError(
            f"Expected argument `exact_up_to` to be at most {LARGEST_EXACT_WILCOXON} but got"
            f" {exact_up_to}."
        )
    differences = paired_differences(first, second)
    differences = differences[differences != 0]
    number = len(differences)
    if number == 0:
        return PairedTest(0.0, 1.0, 0, exact=True)
    ranks = mid_ranks(np.abs(differences))
    statistic = float((np.sign(differences) * ranks).sum())
    exact = number <= exact_up_to
    if exact:
        p_value = _count_signed_ranks(ranks, statistic)
    else:
        z = statistic / math.sqrt(float((ranks**2).sum()))
        p_value = 2 * float(special.ndtr(-abs(z)))
    return PairedTest(statistic, p_value, number, exact)


def _count_signed_ranks(ranks: Floats, statistic: float) -> float:
    """Return the share of all signs with a sum of signed ranks at least as far from 0.

    Doubled ranks are integers, also the means of ranks. ``counts[s]`` is the number of subsets of
    the ranks with the doubled sum s, which is W⁺.
    """
    doubled = np.rint(2 * ranks).astype(np.int64)
    total = int(doubled.sum())
    counts = np.zeros(total + 1)
    counts[0] = 1
    for rank in doubled:
        counts[rank:] = counts[rank:] + counts[:-rank]  # the sum is made before it is assigned
    signed = 2 * np.arange(total + 1) - total  # of W⁺ − W⁻, doubled
    return float(counts[np.abs(signed) >= abs(round(2 * statistic))].sum() / 2.0 ** len(ranks))


def sign_flip_test(
    first: ArrayLike, second: ArrayLike, draws: int = 9_999, seed: int = 0
) -> PairedTest:
    """Return the permutation test of a mean difference, which flips the signs of differences.

    Assumes that the two methods of a pair can be swapped: the difference is symmetric about 0 under
    the null hypothesis, and pairs are independent. It needs no normal distribution. With n pairs,
    no p-value is below 2 / 2ⁿ, so five seeds never reach 0.05.

    Args:
        first: Results of the first method, [pairs].
        second: Results of the second method on the same seeds, [pairs].
        draws: Number m of random flips for more than 30 pairs.
        seed: Seed of the flips. Equal arguments give equal numbers.

    Returns:
        The test with the mean difference as statistic. Up to 30 pairs, the p-value is the share of
        all 2ⁿ flips with a mean at least as far from 0. Above, it is (b + 1) / (m + 1) for b such
        flips among m random ones. Without any difference it is 1; for a single pair it is 1, too.

    Raises:
        ValueError: If the numbers of values differ, or a value is not finite.

    Source: R. A. Fisher, "The Design of Experiments", 1935, section 21; for random flips, B.
    Phipson and G. Smyth, "Permutation P-values Should Never Be Zero", Statistical Applications in
    Genetics and Molecular Biology 9, 2010, equation 2.

    Example:
        >>> sign_flip_test([1, 2, 3, 4, 5], [0, 0, 0, 0, 0]).p_value
        0.0625
    """
    check_draws(draws)
    differences = np.sort(paired_differences(first, second))
    number, statistic = len(differences), compute_mean(differences)
    nonzero = differences[differences != 0]
    bound = abs(float(nonzero.sum())) - _TOLERANCE * float(np.abs(nonzero).sum())
    if len(nonzero) <= LARGEST_EXACT_FLIPS:
        return PairedTest(statistic, _count_flips(nonzero, bound), number, exact=True)
    generator, extreme = np.random.default_rng(seed), 0
    for size in split_draws(draws, len(nonzero)):
        signs = generator.integers(2, size=(size, len(nonzero))) * 2 - 1
        extreme += int((np.abs(signs @ nonzero) >= bound).sum())
    return PairedTest(statistic, (1 + extreme) / (1 + draws), number, exact=False)


def _count_flips(differences: Floats, bound: float) -> float:
    """Return the share of all flips whose sum is at least ``bound`` away from 0.

    Each sum is one of the first half of the differences plus one of the second half, so that
    sorted sums of the halves are enough to count them.
    """
    if bound <= 0:
        return 1.0
    first, second = (_sum_flips(half) for half in np.array_split(differences, 2))
    above = len(second) - np.searchsorted(np.sort(second), bound - first)
    return 2.0 * int(above.sum()) / 2.0 ** len(differences)


def _sum_flips(differences: Floats) -> Floats:
    """Return the sums of all flips, [2ⁿ]."""
    sums = np.zeros(1)
    for difference in differences:
        sums = np.concatenate([sums + difference, sums - difference])
    return sums


def swap_test(
    first: ArrayLike,
    second: ArrayLike,
    statistic: Callable[[Floats], Floats],
    draws: int = 9_999,
    seed: int | Uniforms = 0,
) -> PairedTest:
    """Return the paired permutation test of a statistic over clients, such as their deviation.

    Null hypothesis: the two methods of a client can be swapped. The test compares the mean over
    seeds of the two statistics' difference with those after random swaps. Assumes that clients are
    independent of each other, which the clients of one seed are not: the test is about these runs.
    For a deviation, it loses power where the means of the two methods differ: swaps then mix two
    means.

    Args:
        first: Results of the first method, [seeds, clients].
        second: Results of the second method on the same seeds and clients, of the same shape.
        statistic: Maps results [..., clients] to statistics [...].
        draws: Number m of random swaps.
        seed: Seed of the swaps, or a source of uniform numbers. Equal seeds give equal numbers.

    Returns:
        The test with the mean difference of the two statistics. Its p-value is (b + 1) / (m + 1)
        for b swaps with a difference at least as far from 0; 1 without any difference.

    Raises:
        ValueError: If the shapes differ, or a value is not finite.

    Source: B. Phipson and G. Smyth, "Permutation P-values Should Never Be Zero", Statistical
    Applications in Genetics and Molecular Biology 9, 2010, equation 2.
    """
    check_draws(draws)
    before, after = (np.asarray(values, dtype=np.float64) for values in (first, second))
    if before.shape != after.shape or before.ndim != 2 or not before.size:
        raise ValueError(
            "Expected arguments `first` and `second` to be of equal shape [seeds, clients] but got"
            f" {list(before.shape)} and {list(after.shape)}."
        )
    check_finite(before, "first")
    check_finite(after, "second")
    observed = float((statistic(before) - statistic(after)).mean())
    scale = max(float(np.abs(statistic(values)).max()) for values in (before, after))
    bound = abs(observed) - _TOLERANCE * scale
    source = np.random.default_rng(seed) if isinstance(seed, int | np.integer) else seed
    extreme = 0
    for size in split_draws(draws, before.size):
        swap = source.random((size, *before.shape)) < 0.5
        swapped = statistic(np.where(swap, after, before))
        differences = swapped - statistic(np.where(swap, before, after))
        extreme += int((np.abs(differences.mean(-1)) >= bound).sum())
    return PairedTest(observed, (1 + extreme) / (1 + draws), before.size, exact=False)
