"""Aggregates over many tasks: interquartile means and performance profiles, over seeds.

A task is a data set, or a condition such as an attack. Source of all definitions: R. Agarwal, M.
Schwarzer, P. S. Castro, A. Courville and M. Bellemare, "Deep Reinforcement Learning at the Edge of
the Statistical Precipice", NeurIPS 2021, arXiv 2108.13264, sections 4.1 to 4.3.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pl_fed.statistics.draws import split_draws
from pl_fed.statistics.intervals import LEVEL, Interval
from pl_fed.statistics.samples import (
    Floats,
    check_draws,
    check_finite,
    check_sample,
    check_scores,
    check_share,
)


def interquartile_mean(scores: Floats) -> Floats:
    """Return the mean of the middle half of the scores of all seeds and tasks.

    A quarter of the scores, rounded down, is cut at each end. The mean is less sensitive to
    outliers than the plain mean, and uses more scores than the median. It is not for tasks of
    different scales, where the middle half is that of a few tasks: normalize scores first.

    Args:
        scores: The scores, [..., seeds, tasks].

    Returns:
        Interquartile means, [...].

    Example:
        >>> float(interquartile_mean(np.array([[0.0, 2.0, 4.0, 90.0]])))
        3.0
    """
    pooled = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = pooled.shape[-1] // 4
    return np.asarray(pooled[..., cut : pooled.shape[-1] - cut].mean(-1))


def aggregate_interval(
    scores: ArrayLike,
    statistic: Callable[[Floats], Floats] = interquartile_mean,
    level: float = LEVEL,
    draws: int = 2_000,
    seed: int = 0,
) -> Interval:
    """Return an aggregate over tasks with its interval by a stratified bootstrap over seeds.

    Each resample draws as many seeds with replacement, independently for each task, so every task
    keeps its weight. Assumes independent seeds within a task and independent tasks. The interval is
    about further seeds of these tasks, not about further tasks. It is too narrow for three seeds
    or fewer, unless there are many tasks.

    Args:
        scores: The scores, [seeds, tasks].
        statistic: Maps scores [..., seeds, tasks] to aggregates [...]. The seeds of a task are in
            any order: seeds of different tasks are not paired.
        level: The confidence level, in (0, 1).
        draws: Number of resamples.
        seed: Seed of the resamples. Equal arguments give equal numbers.

    Returns:
        The aggregate with a percentile interval; without an interval for a single seed.

    Raises:
        ValueError: If the table is empty, or a score is not finite.

    Example:
        >>> aggregate_interval([[0.5, 0.7], [0.6, 0.8]]).text()
        '0.65 [0.60, 0.70]'
    """
    table, low_and_high = _check_aggregate(scores, level, draws)
    estimate = float(statistic(table))
    if len(table) < 2:
        return Interval(estimate, -np.inf, np.inf, level)
    aggregates = _resample(table, statistic, draws, seed)
    low, high = np.quantile(aggregates, low_and_high)
    return Interval(estimate, float(low), float(high), level)


@dataclass(frozen=True)
class PerformanceProfile:
    """Performance profile: the share of runs above each threshold, with a pointwise band.

    Args:
        thresholds: The thresholds τ, [thresholds].
        shares: The mean over tasks of the share of seeds with a score above τ, in [0, 1].
        low: Lower end of the band at each threshold.
        high: Upper end of the band at each threshold.
        level: The confidence level of the band at a single threshold, in (0, 1).
    """

    thresholds: Floats
    shares: Floats
    low: Floats
    high: Floats
    level: float


def performance_profile(
    scores: ArrayLike,
    thresholds: ArrayLike,
    level: float = LEVEL,
    draws: int = 2_000,
    seed: int = 0,
) -> PerformanceProfile:
    """Return the performance profile of a method over seeds and tasks.

    Where the profile of one method lies above another's at all thresholds, it is stochastically
    better. The band is by the stratified bootstrap of :func:`aggregate_interval` with its
    assumptions. It is pointwise: a band for all thresholds at once would be wider.

    Args:
        scores: The scores, larger is better, [seeds, tasks].
        thresholds: The thresholds, [thresholds].
        level: The confidence level, in (0, 1).
        draws: Number of resamples.
        seed: Seed of the resamples. Equal arguments give equal numbers.

    Returns:
        The profile. For a single seed, the band is [0, 1].

    Raises:
        ValueError: If the table or the thresholds are empty or not finite.

    Example:
        >>> performance_profile([[0.5, 0.7], [0.6, 0.8]], [0.55, 0.75]).shares
        array([0.75, 0.25])
    """
    table, low_and_high = _check_aggregate(scores, level, draws)
    points = check_sample(thresholds, "thresholds")

    def shares_above(resampled: Floats) -> Floats:
        return np.stack([(resampled > point).mean((-2, -1)) for point in points], axis=-1)

    shares = shares_above(table)
    if len(table) < 2:
        return PerformanceProfile(points, shares, shares * 0, shares * 0 + 1, level)
    low, high = np.quantile(_resample(table, shares_above, draws, seed), low_and_high, axis=0)
    return PerformanceProfile(points, shares, low, high, level)


def _check_aggregate(scores: ArrayLike, level: float, draws: int) -> tuple[Floats, list[float]]:
    """Return the checked scores, in ascending order within a task, and two probabilities."""
    check_share(level, "level")
    check_draws(draws)
    table = check_scores(scores, "scores", "seeds", "tasks")
    check_finite(table, "scores")
    return np.sort(table, axis=0), [(1 - level) / 2, (1 + level) / 2]


def _resample(
    table: Floats, statistic: Callable[[Floats], Floats], draws: int, seed: int
) -> Floats:
    """Return the statistic of resamples that draw the seeds of each task, [draws, ...]."""
    generator, tasks = np.random.default_rng(seed), np.arange(table.shape[1])
    statistics = []
    for size in split_draws(draws, table.size):
        places = generator.integers(len(table), size=(size, *table.shape))
        statistics.append(statistic(table[places, tasks]))
    return np.concatenate(statistics)
