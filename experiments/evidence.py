"""Evidence of a difference: intervals, paired tests, and clients that never took part.

Runs of one seed have the same clients, so that two methods are compared by pairs. Seeds are
independent: each draws its own clients. The clients of one seed share a global model; a test over
all clients of all seeds is about these runs, and counts dependent clients as independent ones.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from experiments.tables import markdown
from pl_fed.random import generator
from pl_fed.samplers import Sampler

LEVEL = 0.95
SUPPORTED, NOISE, REVERSED = VERDICTS = ("supported", "within noise", "reversed")
SWAPS_AT_ONCE = 500  # of a permutation test, to bound its memory
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

    @classmethod
    def point(cls, number: float) -> "Interval":
        """Return a number without an interval."""
        return cls(number, -math.inf, math.inf)

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
        return Interval.point(mean)
    quantile = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def format_interval(values: Sequence[float], digits: int = 4) -> str:
    """Format the mean over seeds with its interval; a dash without values."""
    return interval(values).text(digits) if values else "–"


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


def rank_direction(first: Sequence[float], second: Sequence[float]) -> float:
    """Return W⁺ − W⁻ of Wilcoxon's test: above 0 if the first tends to be larger, by ranks.

    Its sign can differ from that of the mean difference.

    Raises:
        ValueError: If the numbers of values differ.
    """
    differences = [d for d in paired_differences(first, second) if d]
    ranks = stats.rankdata([abs(d) for d in differences])
    return float(sum(math.copysign(rank, d) for rank, d in zip(ranks, differences)))


def swap_p_value(
    first: Tensor,
    second: Tensor,
    statistic: Callable[[Tensor], Tensor],
    draws: int = 10_000,
    seed: int = 0,
) -> float:
    """Return the p-value of a paired permutation test for a statistic of all clients.

    Null hypothesis: the two methods of a client can be swapped. The test compares the mean over
    seeds of the two statistics' difference with those after random swaps. It is two-sided. For a
    deviation, it loses power where the means of the two methods differ: swaps then mix two means.

    Args:
        first: Results of the first method, float64 [seeds, clients].
        second: Results of the second method on the same seeds and clients, of the same shape.
        statistic: Maps results [..., clients] to statistics [...], such as a deviation over them.
        draws: Number of random swaps.
        seed: Seed of the swaps. Equal arguments give equal numbers.

    Returns:
        (1 + number of swaps at least as extreme) / (1 + ``draws``); 1 without any difference.

    Raises:
        ValueError: If the shapes differ.
    """
    if first.shape != second.shape:
        raise ValueError(f"Expected results of equal shape but got {first.shape}, {second.shape}.")
    both = torch.stack([first, second]).double()
    observed = statistic(both[0]) - statistic(both[1])
    distance = float(observed.mean().abs()) - 10**-DECIMALS  # equal distances count
    draw, extreme = generator(seed, "swaps"), 0
    for start in range(0, draws, SWAPS_AT_ONCE):
        size = min(SWAPS_AT_ONCE, draws - start)
        swap = torch.rand((size, *first.shape), generator=draw) < 0.5
        swapped = torch.where(swap, both.flip(0)[:, None], both[:, None])
        differences = statistic(swapped[0]) - statistic(swapped[1])
        extreme += int((differences.mean(-1).abs() >= distance).sum())
    return (1 + extreme) / (1 + draws)


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
        paper: The paper's difference of the two methods, if it has both.
    """

    names: Sequence[str]
    first: Sequence[float]
    second: Sequence[float]
    first_clients: Sequence[float] = ()
    second_clients: Sequence[float] = ()
    paper: float | None = None

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

    @property
    def client_direction(self) -> float:
        """Above 0 if clients tend to have more by the first method, by ranks; NaN without them."""
        if not self.first_clients:
            return math.nan
        return rank_direction(self.first_clients, self.second_clients)

    @property
    def clients_up_and_down(self) -> str:
        """Shares of clients with more and with less by the first method; a dash without clients."""
        if not self.first_clients:
            return "–"
        differences = paired_differences(self.first_clients, self.second_clients)
        up, down = (100 * statistics.mean(sign * d > 0 for d in differences) for sign in (1, -1))
        return f"{up:.0f} % / {down:.0f} %"


def judge(difference: float, p_value: float, paper: float | None) -> str:
    """Return whether a corrected test supports the paper's order of two methods, or reverses it.

    Args:
        difference: Our difference of the two methods, or the direction of the test.
        p_value: Its corrected p-value.
        paper: The paper's difference.

    Returns:
        One of ``VERDICTS``; an empty text without a test, or without an order in the paper.
    """
    if math.isnan(p_value) or not round(paper or 0.0, DECIMALS):
        return ""
    if p_value >= 1 - LEVEL:
        return NOISE
    return SUPPORTED if difference * paper > 0 else REVERSED


def tabulate_pairs(head: Sequence[str], pairs: Sequence[Pairs], digits: int = 3) -> str:
    """Return the table of paired comparisons, with p-values corrected by Holm's method.

    Tests over seeds are one family, and tests over clients another one. Columns without any value
    are left out.

    Args:
        head: Titles of the cells that name a comparison.
        pairs: The comparisons.
        digits: Decimals of a difference.
    """
    columns = {title: [pair.names[place] for pair in pairs] for place, title in enumerate(head)}
    if any(pair.paper is not None for pair in pairs):
        columns["the paper"] = [_format_difference(pair.paper, digits) for pair in pairs]
    columns["ours"] = [pair.difference.text(digits, sign=True) for pair in pairs]
    columns["seeds"] = [str(len(pair.first)) for pair in pairs]
    columns["p over seeds"] = _format_corrected(pair.p_value for pair in pairs)
    if any(pair.first_clients for pair in pairs):
        columns["clients"] = [str(len(pair.first_clients) or "–") for pair in pairs]
        columns["up / down"] = [pair.clients_up_and_down for pair in pairs]
        columns["p over clients"] = _format_corrected(pair.client_p_value for pair in pairs)
    if all(cell == "–" for cell in columns["p over seeds"]):
        del columns["p over seeds"]
    return markdown(list(columns), zip(*columns.values()))


def _format_difference(difference: float | None, digits: int) -> str:
    return "–" if difference is None else Interval.point(difference).text(digits, sign=True)


def _format_corrected(p_values: Iterable[float]) -> list[str]:
    return [format_p_value(p_value) for p_value in correct_by_holm(list(p_values))]


def format_p_value(p_value: float) -> str:
    """Format a p-value with two digits, and three decimals at most; a dash for NaN."""
    if math.isnan(p_value):
        return "–"
    if p_value < 0.001:
        return "< 0.001"
    return f"{p_value:.3f}" if p_value < 0.1 else f"{p_value:.2f}"


@dataclass(frozen=True)
class Verdicts:
    """Verdicts on a group of comparisons, one per comparison; an empty text without a test.

    Args:
        seeds: The verdicts over seeds.
        clients: The verdicts over clients.
    """

    seeds: Sequence[str]
    clients: Sequence[str]


def judge_groups(groups: Mapping[str, Sequence[Pairs]]) -> dict[str, Verdicts]:
    """Return the verdicts on each group, with p-values corrected for all comparisons of all groups.

    Args:
        groups: Names of the groups → their comparisons.
    """
    pairs = [pair for group in groups.values() for pair in group]
    seeds = iter(correct_by_holm([pair.p_value for pair in pairs]))
    clients = iter(correct_by_holm([pair.client_p_value for pair in pairs]))
    return {
        name: Verdicts(
            [judge(pair.difference.mean, next(seeds), pair.paper) for pair in group],
            [judge(pair.client_direction, next(clients), pair.paper) for pair in group],
        )
        for name, group in groups.items()
    }


def tabulate_rankings(groups: Mapping[str, Sequence[Pairs]], digits: int = 3) -> str:
    """Return a table with one row per group of comparisons: its mean, and the verdicts on them.

    The mean is over the group's comparisons with several seeds: first over the comparisons of a
    seed, then over the seeds. The p-values of the means are corrected for the number of groups.

    Args:
        groups: Names of the groups → their comparisons, on the same seeds within a group.
        digits: Decimals of a difference.
    """
    means = [_mean_of_group(group) for group in groups.values()]
    p_values = _format_corrected(mean.p_value for mean in means)
    rows = []
    for (name, verdicts), mean, p_value in zip(judge_groups(groups).items(), means, p_values):
        differences = [pair.difference.mean for pair in groups[name]]
        rows.append(
            [
                name,
                _format_difference(mean.paper, digits),
                mean.difference.text(digits, sign=True),
                p_value,
                count_same_signs(differences, [pair.paper for pair in groups[name]]),
                count_verdicts(verdicts.seeds),
                count_verdicts(verdicts.clients),
            ]
        )
    head = ["", "the paper, mean", "ours, mean", "p of the mean", "same sign"]
    return _drop_empty_columns([*head, "verdicts over seeds", "verdicts over clients"], rows)


def _mean_of_group(group: Sequence[Pairs]) -> Pairs:
    """Return the mean of comparisons for each seed; single seeds only where no other exist."""
    repeated = [pair for pair in group if len(pair.first) > 1] or group
    papers = [pair.paper for pair in repeated]
    first = [statistics.mean(values) for values in zip(*(p.first for p in repeated), strict=True)]
    second = [statistics.mean(values) for values in zip(*(p.second for p in repeated), strict=True)]
    paper = None if None in papers else statistics.mean(p for p in papers if p is not None)
    return Pairs([], first, second, paper=paper)


def _drop_empty_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    columns = [column for column in zip(head, *rows) if {*column[1:]} - {"–"}]
    return markdown([column[0] for column in columns], zip(*(column[1:] for column in columns)))


def count_verdicts(verdicts: Sequence[str]) -> str:
    """Return the numbers of verdicts, such as ``11 supported, 7 within noise``; a dash without."""
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in verdicts]
    return ", ".join(counts) or "–"


def count_same_signs(differences: Sequence[float], papers: Sequence[float | None]) -> str:
    """Return the number of differences with the paper's sign, such as ``9 of 10``."""
    signs = [
        d * p > 0 for d, p in zip(differences, papers, strict=True) if round(p or 0.0, DECIMALS)
    ]
    return f"{sum(signs)} of {len(signs)}" if signs else "–"


def count_tests(pairs: Sequence[Pairs]) -> str:
    """Return the numbers of tests that a table of comparisons corrects for."""
    seeds = sum(not math.isnan(pair.p_value) for pair in pairs)
    clients = sum(bool(pair.first_clients) for pair in pairs)
    kinds = [f"{seeds} tests over seeds"] * bool(seeds)
    kinds += [f"{clients} tests over clients"] * bool(clients)
    return f"All {len(pairs)} comparisons: {', '.join(kinds)}"


def explain_tests(seeds: bool = True, clients: bool = True) -> str:
    """Return a Markdown list that explains the tests of a page.

    Args:
        seeds: Whether the page has tests over seeds.
        clients: Whether it has tests over clients.
    """
    over_seeds = (
        "- p over seeds: a paired t-test, would other seeds give the same sign? A seed is one\n"
        "  pair, so few seeds show only large or steady differences. Brackets are 95 % intervals\n"
        "  over seeds, without a correction.\n"
    )
    over_clients = (
        "- p over clients: Wilcoxon's signed-rank test on all clients of all seeds, with equal\n"
        "  weights. The clients of a seed share a global model, so this test counts dependent\n"
        "  clients as independent ones. It is about these runs alone. Up / down: the shares of\n"
        "  clients with more and with less by the first method. Verdicts over clients follow the\n"
        "  ranks. They can point to the other side than the mean, when few clients differ much.\n"
    )
    return f"{over_seeds if seeds else ''}{over_clients if clients else ''}" + (
        "- All p-values are corrected by Holm's method: for the number of tests of their kind in\n"
        "  their table, or for the number of means.\n"
        "- Supported: our difference has the paper's sign, and p < 0.05. Reversed: the other\n"
        "  sign, and p < 0.05. Within noise: all others. The paper's figures count as exact.\n"
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
