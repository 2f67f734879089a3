"""Verdicts on a paper's order of methods, and their tables.

Runs of one seed have the same clients, so that two methods are compared by pairs. Seeds are
independent: each draws its own clients. The clients of one seed share a global model; a test over
all clients of all seeds is about these runs, and counts dependent clients as independent ones. The
intervals and tests are those of ``pl_fed.statistics``.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.papers import markdown
from pl_fed.statistics import (
    Interval,
    PairedTest,
    correct_by_holm,
    format_p_value,
    paired_differences,
    paired_t_test,
    t_interval,
    wilcoxon_test,
)
from pl_fed.statistics.paired_tests import LARGEST_EXACT_WILCOXON

ALPHA = 0.05
SUPPORTED, NOISE, REVERSED = VERDICTS = ("supported", "within noise", "reversed")
DECIMALS = 10  # of a paper's difference: those that are 0 but for rounding are no order


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
        return t_interval(paired_differences(self.first, self.second))

    @property
    def p_value(self) -> float:
        """The p-value over seeds, without a correction; NaN for a single seed."""
        return paired_t_test(self.first, self.second).p_value

    @property
    def client_test(self) -> PairedTest:
        """Wilcoxon's test over clients, without a correction; NaN without clients.

        The committed tables take the normal distribution above 50 clients, and above 13 clients
        with ties.
        """
        if not self.first_clients:
            return PairedTest(math.nan, math.nan, 0, exact=False)
        differences = paired_differences(self.first_clients, self.second_clients)
        tied = 0 in differences or len({*np.abs(differences)}) < len(differences)
        largest = 13 if tied else LARGEST_EXACT_WILCOXON
        exact_up_to = largest if len(differences) <= largest else 0
        return wilcoxon_test(self.first_clients, self.second_clients, exact_up_to)

    @property
    def clients_up_and_down(self) -> str:
        """Shares of clients with more and with less by the first method; a dash without clients."""
        if not self.first_clients:
            return "–"
        differences = paired_differences(self.first_clients, self.second_clients)
        up, down = 100 * (differences > 0).mean(), 100 * (differences < 0).mean()
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
    if p_value >= ALPHA:
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
        columns["p over clients"] = _format_corrected(pair.client_test.p_value for pair in pairs)
    if all(cell == "–" for cell in columns["p over seeds"]):
        del columns["p over seeds"]
    return markdown(list(columns), zip(*columns.values()))


def _format_difference(difference: float | None, digits: int) -> str:
    return "–" if difference is None else Interval.point(difference).text(digits, sign=True)


def _format_corrected(p_values: Iterable[float]) -> list[str]:
    return [format_p_value(p_value) for p_value in correct_by_holm(list(p_values))]


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
    clients = iter(correct_by_holm([pair.client_test.p_value for pair in pairs]))
    return {
        name: Verdicts(
            [judge(pair.difference.estimate, next(seeds), pair.paper) for pair in group],
            [judge(pair.client_test.statistic, next(clients), pair.paper) for pair in group],
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
        differences = [pair.difference.estimate for pair in groups[name]]
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
