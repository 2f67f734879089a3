"""Clients within seeds: how far the clients of one seed are from independent."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pl_fed.statistics.samples import check_sample


@dataclass(frozen=True)
class ClusterEffect:
    """Effect of the seeds on the clients' values.

    Args:
        correlation: Intraclass correlation: the share of the variance that is between seeds, at
            most 1. It can be below 0 when seeds differ less than chance.
        design_effect: Variance of the mean over all clients, divided by that of as many independent
            clients: 1 + (m − 1) · correlation for m clients per seed.
        effective_pairs: Number of independent clients with the same variance of the mean, at most
            the number of clients.
    """

    correlation: float
    design_effect: float
    effective_pairs: float


def measure_cluster_effect(values: ArrayLike, seeds: Sequence[Hashable]) -> ClusterEffect:
    """Return how much a test over clients overstates its number of independent pairs.

    A test that takes the clients of all seeds as independent has standard errors that are too small
    by the root of the design effect. The estimate is itself rough for few seeds. It is not for a
    correction of p-values: for a statement about further runs, test over seeds.

    Args:
        values: One value for each client of each seed, such as a difference of methods, [pairs].
        seeds: Seed of each value, [pairs].

    Raises:
        ValueError: If a value is not finite, the lengths differ, or there are fewer than two seeds
            or no seed with two clients.

    Source: the one-way analysis of variance, S. Searle, G. Casella and C. McCulloch, "Variance
    Components", 1992, section 3.6; the design effect, L. Kish, "Survey Sampling", 1965, section
    5.4.

    Example:
        >>> measure_cluster_effect([1.0, 1.0, 3.0, 3.0], [0, 0, 1, 1])
        ClusterEffect(correlation=1.0, design_effect=2.0, effective_pairs=2.0)
    """
    sample = check_sample(values)
    numbers = {seed: number for number, seed in enumerate(dict.fromkeys(seeds))}
    clusters = np.array([numbers[seed] for seed in seeds], dtype=np.int64)
    if len(clusters) != len(sample):
        raise ValueError(
            f"Expected arguments `values` and `seeds` to have equal lengths but got {len(sample)}"
            f" and {len(clusters)}."
        )
    sizes = np.bincount(clusters)
    if len(sizes) < 2 or len(sizes) == len(sample):
        raise ValueError(
            "Expected at least two seeds, and a seed with at least two clients, but got"
            f" {len(sizes)} seeds and {len(sample)} values."
        )
    means = np.bincount(clusters, weights=sample) / sizes
    between = (sizes * (means - sample.mean()) ** 2).sum() / (len(sizes) - 1)
    within = ((sample - means[clusters]) ** 2).sum() / (len(sample) - len(sizes))
    typical = (len(sample) - (sizes**2).sum() / len(sample)) / (len(sizes) - 1)
    total = between + (typical - 1) * within
    correlation = float((between - within) / total) if total > 0 else 0.0
    weighted_size = float((sizes**2).sum() / len(sample))
    design_effect = max(1.0, 1 + (weighted_size - 1) * correlation)
    return ClusterEffect(correlation, design_effect, len(sample) / design_effect)
