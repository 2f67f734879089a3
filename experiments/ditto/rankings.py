"""Ditto's claim, that its personal models beat the baselines, as paired comparisons."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scipy import stats

from experiments.ditto.results import (
    ROWS,
    Results,
    describe,
    describe_row,
    results_of,
)
from experiments.evidence import (
    Pairs,
    count_same_signs,
    count_tests,
    count_verdicts,
    explain_tests,
    judge,
    tabulate_pairs,
    tabulate_rankings,
)
from experiments.grid import Row
from experiments.tables import fold, markdown
from pl_fed.statistics import Interval, correct_by_holm, format_p_value
from pl_fed.statistics.intervals import LEVEL

OWN, FIXED = "dynamic_lambda", "Ditto, lambda=1"  # Ditto's row, and its stand-in without choices
BASELINES = ["global", *(row for row in ROWS if not row.startswith("Ditto"))]
LAMS = ["best_lambda", *(row for row in ROWS if row.startswith("Ditto"))]
FAIRNESS = ["global", "local", "fair"]  # rows with which the paper compares Ditto's fairness
HEAD = ["Ditto − method", "condition"]
Figures = dict[tuple[str, str], tuple[float, float]]  # condition, row → the paper's mean and std


@dataclass(frozen=True)
class Unpaired:
    """Mean accuracies of two methods over the clients of one run each, without rows of clients.

    Args:
        names: Cells of a table that name the comparison.
        means: The means of the two methods over clients.
        stds: Their population standard deviations over clients.
        clients: Number of clients.
        paper: The paper's difference, if it has both methods.
    """

    names: Sequence[str]
    means: tuple[float, float]
    stds: tuple[float, float]
    clients: int
    paper: float | None

    @property
    def test(self) -> tuple[Interval, float]:
        """Welch's interval of the difference, and its p-value without a correction."""
        scale = math.sqrt(self.clients / (self.clients - 1))
        first, second = (std * scale for std in self.stds)
        test = stats.ttest_ind_from_stats(
            self.means[0], first, self.clients, self.means[1], second, self.clients, equal_var=False
        )
        difference = self.means[0] - self.means[1]
        error = math.hypot(first, second) / math.sqrt(self.clients)
        freedom = (self.clients - 1) * (first**2 + second**2) ** 2 / (first**4 + second**4)
        half = float(stats.t.ppf((1 + LEVEL) / 2, freedom)) * error
        return Interval(difference, difference - half, difference + half), float(test.pvalue)


def paper_figures(paper: Iterable[Row]) -> Figures:
    """Return the paper's mean and standard deviation over devices, by condition and row."""
    return {(r["condition"], r["row"]): (float(r["mean"]), float(r["std"])) for r in paper}


def pair_methods(
    results: Results, paper: Figures, rows: Sequence[str], column: str, ours: str = OWN
) -> dict[str, list[Pairs]]:
    """Return the comparisons of Ditto with some rows of the paper, by row.

    Args:
        results: The results of a folder.
        paper: The paper's figures.
        rows: The rows of the paper.
        column: The compared column: ``accuracy_weighted`` or ``accuracy_std``.
        ours: Ditto's row.
    """
    place = 1 if column == "accuracy_std" else 0
    groups: dict[str, list[Pairs]] = {}
    for row in rows:
        for condition in results.conditions:
            first, second = (results.values(condition, name, column) for name in (ours, row))
            clients: list[list[float]] = [[], []]
            if place == 0:
                clients = [results.client_values(condition, name) for name in (ours, row)]
            if first and second and row != ours:
                figures = [paper.get((condition, name)) for name in (ours, row)]
                published = [figure[place] for figure in figures if figure]
                groups.setdefault(describe_row(row), []).append(
                    Pairs(
                        [describe_row(row), describe(condition)],
                        first,
                        second,
                        *(clients if all(clients) else ([], [])),
                        paper=published[0] - published[1] if len(published) == 2 else None,
                    )
                )
    return groups


def pair_with_best(results: Results, paper: Figures) -> dict[str, list[Pairs]]:
    """Return Ditto's comparisons with the paper's best other method of each condition."""
    groups = pair_methods(results, paper, BASELINES, "accuracy_weighted")
    pairs = {tuple(pair.names): pair for group in groups.values() for pair in group}
    best = []
    for condition in results.conditions:
        rows = [row for row in BASELINES if (condition, row) in paper]
        row = max(rows, key=lambda row: paper[condition, row][0])
        best.append(pairs[describe_row(row), describe(condition)])
    return {"the paper's best other method": best}


def tabulate_all_rankings(name: str, results: Results, paper: Iterable[Row]) -> str:
    """Return the section about the rankings of a folder's table."""
    figures = paper_figures(paper)
    rows = [*BASELINES, *LAMS]
    if name == "vehicle_rounded_down":  # Ditto's runs do not depend on the counts
        rows = [row for row in rows if results.values(results.conditions[0], row, "accuracy")]
        results = results.add_ditto(results_of("vehicle"))
    ours = OWN if results.values(results.conditions[0], OWN, "accuracy") else FIXED
    if len(results.seeds) == 1:
        return tabulate_one_seed(results, figures, ours)
    baselines = [row for row in rows if row in BASELINES]
    parts = [
        "\n## Does Ditto beat the other methods?\n",
        f'Below, "Ditto" is the row "{describe_row(ours)}".\n',
    ]
    words = (
        "- The devices of all seeds are the same. A seed draws other test samples, cohorts and\n"
        "  minibatches. Only Ditto's runs have rows of devices.\n"
    )
    parts += [fold("The tests in words", f"{words}{explain_tests()}")]
    if name == "vehicle":
        parts += ["**Accuracy over all samples, Ditto − the paper's best other method**\n"]
        parts += [tabulate_groups(pair_with_best(results, figures))]
    parts += ["**Accuracy over all samples, Ditto − method**\n"]
    parts += [tabulate_groups(pair_methods(results, figures, baselines, "accuracy_weighted"))]
    if groups := pair_methods(results, figures, [r for r in FAIRNESS if r in rows], "accuracy_std"):
        parts += ["**Standard deviation over devices, Ditto − method** (a fairer Ditto: below 0)\n"]
        parts += [tabulate_groups(groups)]
    if groups := pair_methods(
        results, figures, [row for row in rows if row in LAMS], "accuracy_weighted"
    ):
        parts += ["**Accuracy over all samples, each client's own λ − one λ for all**\n"]
        parts += [tabulate_groups(groups)]
    return "\n".join(parts)


def tabulate_groups(groups: dict[str, list[Pairs]]) -> str:
    """Return the table of some rankings, and the folded table of their comparisons."""
    pairs = [pair for group in groups.values() for pair in group]
    return f"{tabulate_rankings(groups)}\n{fold(count_tests(pairs), tabulate_pairs(HEAD, pairs))}"


def compare_devices(results: Results, paper: Figures, ours: str) -> list[Unpaired]:
    """Return Ditto's comparisons over the devices of single runs, without rows of the others."""
    compared = []
    for row in BASELINES:
        for condition in results.conditions:
            names = (ours, row)
            means = [results.values(condition, name, "accuracy") for name in names]
            stds = [results.values(condition, name, "accuracy_std") for name in names]
            if all(means):
                (first, second), (low, high) = ([v for (v,) in values] for values in (means, stds))
                published = [paper[condition, n][0] for n in names if (condition, n) in paper]
                compared.append(
                    Unpaired(
                        [describe_row(row), describe(condition)],
                        (first, second),
                        (low, high),
                        results.count_clients(condition),
                        published[0] - published[1] if len(published) == 2 else None,
                    )
                )
    return compared


def tabulate_one_seed(results: Results, paper: Figures, ours: str) -> str:
    """Return the section about rankings for single runs: tests over devices instead of seeds."""
    groups = pair_methods(results, paper, LAMS, "accuracy", ours)
    groups = {row: group for row, group in groups.items() if group[0].first_clients}
    words = (
        "- Each method has one run, so no interval covers the chance of training. Under attack, a\n"
        "  global model moves by several hundredths from round to round.\n"
        "- p over devices: Welch's test, for methods without rows of devices. Brackets are 95 %\n"
        "  intervals of the difference of two means over devices. Both ignore that the devices\n"
        "  are the same, so intervals are too wide where a device is easy for both methods.\n"
    )
    parts = [
        "\n## Does Ditto beat the other methods?\n",
        f'Below, "Ditto" is the row "{describe_row(ours)}".\n',
    ]
    parts += [fold("The tests in words", f"{words}{explain_tests(False, bool(groups))}")]
    parts += ["**Mean accuracy over devices, Ditto − method, single runs**\n"]
    parts += [tabulate_unpaired(compare_devices(results, paper, ours))]
    if groups:
        parts += ["**Mean accuracy over devices, each client's own λ − one λ for all**\n"]
        parts += [tabulate_groups(groups)]
    return "\n".join(parts)


def tabulate_unpaired(compared: Sequence[Unpaired]) -> str:
    """Return the table of verdicts by method, and the folded table of all comparisons."""
    tests = [comparison.test for comparison in compared]
    corrected = correct_by_holm([p_value for _, p_value in tests])
    verdicts = [
        judge(difference.estimate, p_value, comparison.paper)
        for comparison, (difference, _), p_value in zip(compared, tests, corrected)
    ]
    rows = [
        [
            *comparison.names,
            "–" if comparison.paper is None else Interval.point(comparison.paper).text(3, True),
            difference.text(3, sign=True),
            str(comparison.clients),
            format_p_value(p_value),
            verdict,
        ]
        for comparison, (difference, _), p_value, verdict in zip(
            compared, tests, corrected, verdicts
        )
    ]
    short = []
    for method in dict.fromkeys(comparison.names[0] for comparison in compared):
        own = [place for place, c in enumerate(compared) if c.names[0] == method]
        signs = count_same_signs(
            [tests[place][0].estimate for place in own], [compared[place].paper for place in own]
        )
        short.append([method, signs, count_verdicts([verdicts[place] for place in own])])
    details = markdown([*HEAD, "the paper", "ours", "devices", "p over devices", "verdict"], rows)
    title = f"All {len(rows)} comparisons: {len(rows)} tests over devices"
    return f"{markdown(['', 'same sign', 'verdicts over devices'], short)}\n{fold(title, details)}"
