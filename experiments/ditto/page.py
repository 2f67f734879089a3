"""Pages of Ditto's Tables 1, 5, 7 and 9, from the committed results."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from experiments.ditto.results import (
    HERE,
    ORDER,
    REPEATED,
    Results,
    describe,
    describe_row,
)
from experiments.experiment import read_csv
from experiments.papers import (
    Comparison,
    PaperTable,
    count_agreements,
    fold,
    format_interval,
    markdown,
    notes,
    tabulate_misses,
)
from experiments.rankings import (
    Pairs,
    count_same_signs,
    count_tests,
    count_verdicts,
    explain_tests,
    judge,
    tabulate_pairs,
    tabulate_rankings,
)
from pl_fed.statistics import Interval, correct_by_holm, format_p_value
from pl_fed.statistics.intervals import LEVEL

BANDS: dict[str, dict[str, float]] = {
    "fashion": {"clean": 0.015, "A1": 0.015, "A2": 0.05, "A3": 0.05},
    "vehicle": dict.fromkeys(("clean", "A1", "A2", "A3"), 0.05),
}
OWN = "dynamic_lambda"  # Ditto's row
LAMS = [row for row in ORDER if row.startswith("Ditto")]
BASELINES = [row for row in ORDER if row not in (*LAMS, *REPEATED)]
LAMS = ["best_lambda", *LAMS]
FAIRNESS = ["global", "local", "fair"]  # rows with which the paper compares Ditto's fairness
HEAD = ["Ditto − method", "condition"]
Figures = Mapping[tuple[str, str], tuple[float, float]]  # condition, row → mean and std
Groups = dict[str, list[Pairs]]


def read_paper(name: str) -> Figures:
    """Return the paper's means and standard deviations over devices for a table."""
    rows = read_csv(HERE / name / "paper.csv")
    return {(r["condition"], r["row"]): (float(r["mean"]), float(r["std"])) for r in rows}


def compare(name: str, results: Results | None = None) -> dict[tuple[str, str], Comparison]:
    """Return comparisons with the paper, by condition and row; none without a band.

    Args:
        name: The table, such as ``vehicle``.
        results: Its results; by default the committed ones.
    """
    results, compared = results or Results.read(name), {}
    for (condition, row), (mean, _) in read_paper(name).items():
        band = BANDS[name].get(condition.split("_")[0])
        ours = results.values(condition, row, "accuracy_weighted")
        if ours and band is not None:
            compared[condition, row] = Comparison(mean, None, ours, band)
    return compared


def tabulate_condition(
    results: Results,
    paper: Figures,
    compared: Mapping[tuple[str, str], Comparison],
    condition: str,
) -> str:
    """Return the table of a condition."""
    rows = []
    banded = [item for (name, _), item in compared.items() if name == condition]
    for name in ORDER:
        ours, over_devices, spread = (
            format_interval(results.values(condition, name, column), 3)
            for column in ("accuracy_weighted", "accuracy", "accuracy_std")
        )
        cells = ["–", ours, ""]
        if (condition, name) in compared:
            cells = compared[condition, name].cells(3, format_interval)
        _, std = paper.get((condition, name), (math.nan, math.nan))
        cells += [over_devices, "–" if math.isnan(std) else f"{std:.2f}", spread]
        rows += [[describe_row(name), *cells]] if ours != "–" else []
    head = ["", "the paper", "ours", "difference", "ours, mean over devices"]
    head += ["std over devices, the paper", "ours"]
    words = describe(condition)
    title = f"## {words[0].upper()}{words[1:]}: {count_agreements(banded)} agree"
    title += f" (within {banded[0].band})"
    return f"{title}\n\n" + fold("All methods", markdown(head, rows))


def make_page(name: str) -> str:
    """Return the text of the table of a folder."""
    results, paper = Results.read(name), read_paper(name)
    compared = compare(name, results)
    named = {f"{describe(c)}: {describe_row(row)}": item for (c, row), item in compared.items()}
    runs = results.runs.values()
    head = (
        (HERE / name / "head.md")
        .read_text()
        .format(
            runs=len(runs),
            seeds=", ".join(results.seeds),
            seeds_n=len(results.seeds),
            hours=sum(float(row["seconds/total"]) for row in runs) / 3600,
            agree=count_agreements(named.values()),
            misses=tabulate_misses(named, 3, format_interval),
        )
    )
    compare_methods = tabulate_one_seed if len(results.seeds) == 1 else tabulate_seeds
    title = "\n## Does Ditto beat the other methods?\n\n"
    title += f'Below, "Ditto" is the row "{describe_row(OWN)}".\n'
    tables = (tabulate_condition(results, paper, compared, c) for c in results.conditions)
    body = f"{title}\n{compare_methods(results, paper)}\n" + "\n".join(tables)
    return head + body + notes(HERE / name)


def write(name: str) -> None:
    """Write the page of a folder."""
    (HERE / name / "table.md").write_text(make_page(name))


def summarize() -> list[PaperTable]:
    """Return the tables for the summary of all experiments."""
    fashion = {
        (condition, row): f"Fashion-MNIST, 500 clients, {describe(condition)}: {name}"
        for condition in ("clean", "A1_50", "A2_50", "A3_20")
        for row, name in (("global", "FedAvg"), (OWN, "Ditto"))
    }
    vehicle = {
        (condition, row): f"Vehicle, {describe(condition)}: {name}"
        for condition in ("clean", "A2_50")
        for row, name in (("global", "FedAvg"), ("Ditto, lambda=1", "Ditto, λ = 1"))
    }
    tables = []
    for name, words, main in (
        ("fashion", "Tables 1, 5 and 9: Fashion-MNIST", fashion),
        ("vehicle", "Tables 5 and 7: Vehicle", vehicle),
    ):
        results = Results.read(name)
        place, command = f"ditto/{name}/table.md", f"experiments ditto/{name}"
        figures, rows = compare(name, results), [*results.runs.values()]
        tables.append(PaperTable(f"Ditto, {words}", place, command, figures, rows, main))
    return tables


# Rankings: the paper's claim, that Ditto's personal models beat the baselines


def find_difference(paper: Figures, condition: str, row: str, place: int = 0) -> float | None:
    """Return the paper's difference of Ditto and another row; ``None`` without one of both."""
    figures = [paper.get((condition, name)) for name in (OWN, row)]
    published = [figure[place] for figure in figures if figure]
    return published[0] - published[1] if len(published) == 2 else None


def pair_methods(results: Results, paper: Figures, rows: Sequence[str], column: str) -> Groups:
    """Return the comparisons of Ditto with some rows of the paper, by row.

    Args:
        results: The results of a folder.
        paper: The paper's figures.
        rows: The rows of the paper.
        column: The compared column, such as ``accuracy_weighted`` or ``accuracy_std``.
    """
    place = 1 if column == "accuracy_std" else 0
    groups: Groups = {}
    for row in rows:
        for condition in results.conditions:
            first, second = (results.values(condition, name, column) for name in (OWN, row))
            clients: list[list[float]] = [[], []]
            if place == 0:
                clients = [results.client_values(condition, name) for name in (OWN, row)]
            if first and second:
                names = [describe_row(row), describe(condition)]
                difference = find_difference(paper, condition, row, place)
                clients = clients if all(clients) else [[], []]
                pairs = Pairs(names, first, second, *clients, paper=difference)
                groups.setdefault(describe_row(row), []).append(pairs)
    return groups


def pair_with_best(results: Results, paper: Figures) -> Groups:
    """Return Ditto's comparisons with the paper's best other method of each condition."""
    groups = pair_methods(results, paper, BASELINES, "accuracy_weighted")
    pairs = {tuple(pair.names): pair for group in groups.values() for pair in group}
    best = []
    for condition in results.conditions:
        rows = [row for row in BASELINES if (condition, row) in paper]
        row = max(rows, key=lambda row: paper[condition, row][0])
        best.append(pairs[describe_row(row), describe(condition)])
    return {"the paper's best other method": best}


def tabulate_seeds(results: Results, paper: Figures) -> str:
    """Return the section about rankings for several seeds."""
    words = (
        "- The devices of all seeds are the same. A seed draws other test samples, cohorts and\n"
        "  minibatches. Only Ditto's runs have rows of devices.\n"
    )
    weighted = "accuracy_weighted"
    families = {
        "Accuracy over all samples, Ditto − the paper's best other method": pair_with_best(
            results, paper
        ),
        "Accuracy over all samples, Ditto − method": pair_methods(
            results, paper, BASELINES, weighted
        ),
        "Standard deviation over devices, Ditto − method": pair_methods(
            results, paper, FAIRNESS, "accuracy_std"
        ),
        "Accuracy over all samples, each client's own λ − one λ for all": pair_methods(
            results, paper, LAMS, weighted
        ),
    }
    parts = [fold("The tests in words", f"{words}{explain_tests()}")]
    for title, groups in families.items():
        note = " (a fairer Ditto: below 0)" if title.startswith("Standard") else ""
        parts += [f"**{title}**{note}\n", tabulate_groups(groups)]
    return "\n".join(parts)


def tabulate_groups(groups: Groups) -> str:
    """Return the table of some rankings, and the folded table of their comparisons."""
    pairs = [pair for group in groups.values() for pair in group]
    return f"{tabulate_rankings(groups)}\n{fold(count_tests(pairs), tabulate_pairs(HEAD, pairs))}"


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
    means: Sequence[float]
    stds: Sequence[float]
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


def compare_devices(results: Results, paper: Figures) -> list[Unpaired]:
    """Return Ditto's comparisons over the devices of single runs, without rows of the others."""
    compared = []
    for row in BASELINES:
        for condition in results.conditions:
            values = [
                [value for name in (OWN, row) for value in results.values(condition, name, column)]
                for column in ("accuracy", "accuracy_std")
            ]
            if len(values[0]) == 2:
                names = [describe_row(row), describe(condition)]
                clients = results.count_clients(condition)
                difference = find_difference(paper, condition, row)
                compared.append(Unpaired(names, values[0], values[1], clients, difference))
    return compared


def tabulate_one_seed(results: Results, paper: Figures) -> str:
    """Return the section about rankings for single runs: tests over devices instead of seeds."""
    words = (
        "- Each method has one run, so no interval covers the chance of training. Under attack, a\n"
        "  global model moves by several hundredths from round to round.\n"
        "- p over devices: Welch's test, for methods without rows of devices. Brackets are 95 %\n"
        "  intervals of the difference of two means over devices. Both ignore that the devices\n"
        "  are the same, so intervals are too wide where a device is easy for both methods.\n"
    )
    parts = [
        fold("The tests in words", f"{words}{explain_tests(seeds=False)}"),
        "**Mean accuracy over devices, Ditto − method, single runs**\n",
        tabulate_unpaired(compare_devices(results, paper)),
        "**Mean accuracy over devices, each client's own λ − one λ for all**\n",
        tabulate_groups(pair_methods(results, paper, LAMS, "accuracy")),
    ]
    return "\n".join(parts)


def tabulate_unpaired(compared: Sequence[Unpaired]) -> str:
    """Return the table of verdicts by method, and the folded table of all comparisons."""
    tests = [comparison.test for comparison in compared]
    corrected = correct_by_holm([p_value for _, p_value in tests])
    rows, groups = [], {}
    for comparison, (difference, _), p_value in zip(compared, tests, corrected):
        paper = comparison.paper
        verdict = judge(difference.estimate, p_value, paper)
        published = "–" if paper is None else Interval.point(paper).text(3, True)
        cells = [published, difference.text(3, sign=True), str(comparison.clients)]
        rows.append([*comparison.names, *cells, format_p_value(p_value), verdict])
        entry = (difference.estimate, paper, verdict)
        groups.setdefault(comparison.names[0], []).append(entry)
    short = []
    for method, entries in groups.items():
        differences, papers, verdicts = zip(*entries)
        signs = count_same_signs(differences, papers)
        short.append([method, signs, count_verdicts(verdicts)])
    details = markdown([*HEAD, "the paper", "ours", "devices", "p over devices", "verdict"], rows)
    title = f"All {len(rows)} comparisons: {len(rows)} tests over devices"
    return f"{markdown(['', 'same sign', 'verdicts over devices'], short)}\n{fold(title, details)}"
