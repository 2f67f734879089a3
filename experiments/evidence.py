"""Evidence of a difference: intervals, paired tests, and clients that never took part.

Runs of one seed have the same clients, so that two methods are compared by pairs. Seeds are
independent: each draws its own clients. The clients of one seed share a global model; a test over
all clients of all seeds is about these runs, and counts dependent clients as independent ones.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from pl_fed.random import generator
from pl_fed.samplers import Sampler

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """Mean of several numbers with a 95 % interval by Student's t distribution.

    Args:
        mean: The mean.
        low: The lower end; minus infinity for a single number.
        high: The upper end; infinity for a single number.
    """

    mean: float
    low: float
    high: float

    def text(self, digits: int = 2, sign: bool = False) -> str:
        """Return ``mean [low, high]``; the mean alone without an interval."""
        numbers = [self.mean] if math.isinf(self.low) else [self.mean, self.low, self.high]
        mean, *ends = (
            f"{number:{'+' if sign else ''}.{digits}f}".replace("-", "−") for number in numbers
        )
        return f"{mean} [{ends[0]}, {ends[1]}]" if ends else mean


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of the values of several seeds with its interval."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf)
    quantile = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def paired_p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the p-value of a paired t-test over seeds; NaN for fewer than two pairs.

    Equal differences other than 0 give 0; no difference at all gives 1.

    Raises:
        ValueError: If the numbers of values differ.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    if len(differences) < 2:
        return math.nan
    if len(set(differences)) == 1:
        return 0.0 if differences[0] else 1.0
    return float(stats.ttest_1samp(differences, 0).pvalue)


def paired_rank_p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the p-value of Wilcoxon's signed-rank test over clients; 1 without any difference.

    Raises:
        ValueError: If the numbers of values differ.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    if not any(differences):
        return 1.0
    return float(stats.wilcoxon(differences).pvalue)


def count_draws(sampler: Sampler, num_clients: int, rounds: int, seed: int) -> Tensor:
    """Return the number of rounds in which each client takes part, int64 [num_clients].

    They follow from the seed alone, without any training.

    Args:
        sampler: A sampler that does not read the sizes of the clients.
        num_clients: Number of clients.
        rounds: Number of rounds of the run.
        seed: The seed of the run.
    """
    counts = torch.zeros(num_clients, dtype=torch.int64)
    for round in range(rounds):
        counts[draw_cohort(sampler, num_clients, round, seed)] += 1
    return counts


def draw_cohort(sampler: Sampler, num_clients: int, round: int, seed: int) -> Tensor:
    """Return the ids of the clients of a round, int64 [cohort]."""
    sizes = torch.ones(num_clients, dtype=torch.int64)
    return sampler.draw_round(round, num_clients, sizes, generator(seed, "cohort", round))
