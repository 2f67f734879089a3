"""Evidence of a difference: intervals, paired tests, and clients that never took part.

Runs of one seed have the same clients, so that two methods are compared by pairs. Seeds are
independent: each draws its own clients. The clients of one seed share a global model; a test over
all clients of all seeds is about these runs, and counts dependent clients as independent ones.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from experiments.tables import markdown
from pl_fed.random import generator
from pl_fed.samplers import Sampler

LEVEL = 0.95
DECIMALS = 10  # of a difference: results have about five digits, and equal steps must stay ties


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


def paired_differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return the differences of pairs, without the rounding errors of the subtraction.

    Raises:
        ValueError: If the numbers of values differ.
    """
    return [round(a - b, DECIMALS) for a, b in zip(first, second, strict=True)]


def paired_p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the p-value of a paired t-test over seeds; NaN for fewer than two pairs.

    Equal differences other than 0 give 0; no difference at all gives 1.

    Raises:
        ValueError: If the numbers of values differ.
    """
    differences = paired_differences(first, second)
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
    differences = paired_differences(first, second)
    if not any(differences):
        return 1.0
    return float(stats.wilcoxon(differences).pvalue)


def correct_by_holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number by Holm's method; NaN stays NaN and is no test.

    The smallest of m p-values is multiplied by m, the next one by m − 1, and so on. No corrected
    value is below an earlier one, or above 1.

    Source: S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal
    of Statistics 6, 1979.
    """
    tests = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    corrected, largest = [math.nan] * len(p_values), 0.0
    for rank, (p_value, place) in enumerate(tests):
        largest = max(largest, min(1.0, (len(tests) - rank) * p_value))
        corrected[place] = largest
    return corrected


@dataclass(frozen=True)
class Pairs:
    """Results of two methods as pairs: one pair per seed, and one per client and seed.

    Args:
        names: Cells of a table that name the comparison, such as the condition and the methods.
        first: Results of the first method, one per seed.
        second: Results of the second method on the same seeds.
        first_clients: Results of the first method, one per client of every seed, if available.
        second_clients: Results of the second method on the same clients.
    """

    names: Sequence[str]
    first: Sequence[float]
    second: Sequence[float]
    first_clients: Sequence[float] = ()
    second_clients: Sequence[float] = ()

    @property
    def difference(self) -> Interval:
        """The first method's mean minus the second's, with its interval over seeds."""
        return interval(paired_differences(self.first, self.second))

    @property
    def p_value(self) -> float:
        """The p-value over seeds, without a correction; NaN for a single seed."""
        return paired_p_value(self.first, self.second)

    @property
    def client_p_value(self) -> float:
        """The p-value over clients, without a correction; NaN without clients."""
        if not self.first_clients:
            return math.nan
        return paired_rank_p_value(self.first_clients, self.second_clients)


def tabulate_pairs(head: Sequence[str], pairs: Sequence[Pairs], digits: int = 3) -> str:
    """Return the table of paired comparisons, with p-values corrected by Holm's method.

    Tests over seeds are one family, and tests over clients another one.

    Args:
        head: Titles of the cells that name a comparison.
        pairs: The comparisons.
        digits: Decimals of a difference.
    """
    head = [*head, "difference", "seeds", "p over seeds"]
    columns = [[str(len(pair.first)) for pair in pairs], _corrected_cells(p.p_value for p in pairs)]
    if any(pair.first_clients for pair in pairs):
        head += ["clients", "p over clients"]
        columns.append([str(len(pair.first_clients) or "–") for pair in pairs])
        columns.append(_corrected_cells(pair.client_p_value for pair in pairs))
    rows = [
        [*pair.names, pair.difference.text(digits, sign=True), *cells]
        for pair, *cells in zip(pairs, *columns)
    ]
    return markdown(head, rows)


def _corrected_cells(p_values: Iterable[float]) -> list[str]:
    return [format_p_value(p_value) for p_value in correct_by_holm(list(p_values))]


def format_p_value(p_value: float) -> str:
    """Format a p-value with two digits, and three decimals at most; a dash for NaN."""
    if math.isnan(p_value):
        return "–"
    if p_value < 0.001:
        return "< 0.001"
    return f"{p_value:.3f}" if p_value < 0.1 else f"{p_value:.2f}"


def explain_pairs(pairs: Sequence[Pairs]) -> str:
    """Return sentences that explain the tests of a table, with their numbers."""
    seeds = sum(not math.isnan(pair.p_value) for pair in pairs)
    clients = sum(bool(pair.first_clients) for pair in pairs)
    over_seeds = (
        "The p-value over seeds is that of a paired t-test: would other seeds give the same sign? A"
        " seed is one pair, so few seeds show only large or steady differences."
    )
    over_clients = (
        " The p-value over clients is that of Wilcoxon's signed-rank test on all clients of all"
        " seeds. The clients of a seed share a global model, so this test counts dependent clients"
        " as independent ones and is about these runs alone."
    )
    counts = f"{seeds} tests over seeds" + (f" and {clients} over clients" if clients else "")
    return (
        f"{over_seeds}{over_clients if clients else ''} Brackets are 95 % intervals over seeds,"
        f" without a correction. The p-values of the {counts} are corrected by Holm's method"
        f"{', each kind for itself' if clients else ''}."
    )


def count_draws(
    sampler: Sampler, num_clients: int, rounds: int, seed: int, sizes: Tensor | None = None
) -> Tensor:
    """Return the number of rounds in which each client takes part, int64 [num_clients].

    They follow from the seed and the sizes alone, without any training.

    Args:
        sampler: The sampler of the run.
        num_clients: Number of clients.
        rounds: Number of rounds of the run.
        seed: The seed of the run.
        sizes: Numbers of training samples, int64 [num_clients], for a sampler that reads them.
    """
    counts = torch.zeros(num_clients, dtype=torch.int64)
    for round in range(rounds):
        counts[draw_cohort(sampler, num_clients, round, seed, sizes)] += 1
    return counts


def draw_cohort(
    sampler: Sampler, num_clients: int, round: int, seed: int, sizes: Tensor | None = None
) -> Tensor:
    """Return the ids of the clients of a round, int64 [cohort]."""
    if sizes is None:
        sizes = torch.ones(num_clients, dtype=torch.int64)
    return sampler.draw_round(round, num_clients, sizes, generator(seed, "cohort", round))
