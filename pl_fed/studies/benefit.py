"""The benefit of a study's methods over local training, from the run folders of its cells."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pl_fed.reports.benefit import (
    Benefit,
    average_figures,
    compare_runs,
    describe_benefit,
    find_column,
    find_difference_of_clients,
)
from pl_fed.reports.group import is_higher_better
from pl_fed.reports.run import NoFitError, Run, read_run
from pl_fed.statistics import t_interval
from pl_fed.studies.cell_folder import CellFolder, State
from pl_fed.studies.cells import Cell
from pl_fed.studies.comparison import Layout, MetricComparison, Row
from pl_fed.studies.selection import SEED
from pl_fed.studies.tables import (
    CellPlace,
    Table,
    choose_decimals,
    format_estimate,
    format_number,
    join_columns,
    split_metric,
)

NAME = "benefit"
"""Name of the table's files."""

_LOCAL = "pl_fed.clients.local.Local", "pl_fed.clients.Local"
_SHARES = ("share that gains", "share that loses")
_NONE = "–"


@dataclass(frozen=True)
class StudyBenefit:
    """Study benefit: the gains of the clients of all methods over local training.

    Attributes:
        local: The method of local training.
        metric: The metric of the results, without a model.
        by_cell: The benefit for each method, condition and seed.
        missing: The numbers of runs that ended and are left out, by reason.
        is_global: Whether the metric of the comparison is that of global models. Then the gains are
            those of a method's global model, but for local training.
    """

    local: str
    metric: str
    by_cell: Mapping[tuple[str, str, str], Benefit]
    missing: Mapping[str, int]
    is_global: bool = False


def measure_study(
    cells: Sequence[tuple[Cell, Row, CellFolder]], layout: Layout, comparison: MetricComparison
) -> StudyBenefit | None:
    """Return the benefit of a study; ``None`` without finished runs of local training.

    A run is compared with that of local training under the same condition and seed, if both have
    the same clients with the same samples.

    Args:
        cells: The cells, with their rows and folders.
        layout: The methods and conditions of the study.
        comparison: The comparison by the metric that the gains are about.
    """
    done = [(row, folder) for _, row, folder in cells if row["status"] == State.DONE]
    local = _find_local(done, layout)
    if local is None:
        return None
    diverged = sum(row["status"] == State.DIVERGED for _, row, _ in cells)
    runs, missing = {}, {"without files": 0, "of other clients than local training": 0}
    missing["that diverged"] = diverged
    for row, folder in done:
        key = layout.find_method(row), layout.find_condition(row), str(row[SEED])
        try:
            run = read_run(folder.path)
        except (NoFitError, OSError):
            run = None
        if run is None or not run.clients:
            missing["without files"] += 1
        else:
            runs[key] = run
    name = _find_metric(comparison.metric, [run for key, run in runs.items() if key[0] == local])
    by_cell = {}
    for (method, condition, seed), run in runs.items():
        alone = runs.get((local, condition, seed))
        if method == local or alone is None or name is None:
            continue
        if find_difference_of_clients(run, alone):
            missing["of other clients than local training"] += 1
        elif benefit := _compare(run, alone, comparison, name):
            by_cell[method, condition, seed] = benefit
    if not by_cell or not name:
        return None
    return StudyBenefit(local, name, by_cell, missing, _is_global(comparison.metric))


def _find_local(done: Sequence[tuple[Row, CellFolder]], layout: Layout) -> str | None:
    """Return the first method of local training: all its finished runs are of the class Local."""
    are_local: dict[str, list[bool]] = {}
    for row, folder in done:
        classes = folder.read_summary().get("classes")
        path = classes.get("client") if isinstance(classes, Mapping) else None
        are_local.setdefault(layout.find_method(row), []).append(path in _LOCAL)
    return next((m for m in layout.methods if all(are_local.get(m, [False]))), None)


def _find_metric(metric: str, runs: Sequence[Run]) -> str | None:
    """Return the metric of clients behind a metric of the study: accuracy of accuracy_worst10."""
    name = split_metric(metric)[2]
    while name and not any(column.endswith(f"_{name}") for run in runs for column in run.clients):
        name = name.rpartition("_")[0]
    return name or None


def _compare(run: Run, alone: Run, comparison: MetricComparison, metric: str) -> Benefit | None:
    """Return the benefit of a run; ``None`` if no client has a result of the metric in both."""
    has_model = _is_global(comparison.metric) and f"global_{metric}" in run.clients
    try:
        joined = find_column(run, metric, "global" if has_model else None)
        columns = joined, find_column(alone, metric, None)
    except ValueError:
        return None
    is_higher: bool | None = comparison.is_higher_better
    if split_metric(comparison.metric)[2] != metric:  # a figure over clients, such as a spread
        is_higher = is_higher_better([run, alone], metric)
    if is_higher is None:
        return None
    return compare_runs(run, alone, columns, lower_is_better=not is_higher)


def _is_global(metric: str) -> bool:
    """Return whether a metric of the study is that of global models."""
    return split_metric(metric)[1] == "global"


def make_benefit_table(benefit: StudyBenefit, layout: Layout) -> Table:
    """Return the table of gains over local training: a row for each method and condition.

    Args:
        benefit: The benefit of the study.
        layout: The methods and conditions of the study.
    """
    groups: dict[tuple[str, str], list[Benefit]] = {}
    for (method, condition, _), item in benefit.by_cell.items():
        groups.setdefault((method, condition), []).append(item)
    has_conditions = len(layout.conditions) > 1
    rows: list[tuple[str, ...]] = []
    records: list[dict[str, Any]] = []
    cells: dict[tuple[int, int], CellPlace] = {}
    for method in layout.methods:
        for condition in layout.conditions:
            if not (items := groups.get((method, condition))):
                continue
            names = (condition,) if has_conditions else ()
            record = _average(items)
            texts = (*names, *_describe(items, record))
            for place in range(1, len(texts) + 1):
                cells[len(rows), place] = CellPlace((method,), condition)
            rows.append((method, *texts))
            labels = {"method": method, **({"condition": condition} if has_conditions else {})}
            records.append(labels | record)
    figures = [*describe_benefit(next(iter(benefit.by_cell.values())))]
    header = (
        ", ".join(layout.method_axes) or "study",
        *([", ".join(layout.condition_axes)] if has_conditions else []),
        *("seeds", "mean gain", *figures),
    )
    title = f"Gains in test {benefit.metric} over {benefit.local}: who should join?"
    return Table(NAME, title, header, tuple(rows), _explain(benefit), records, cells)


def _average(items: Sequence[Benefit]) -> dict[str, Any]:
    """Return the figures of a method under a condition; empty texts for unknown ones."""
    means: dict[str, Any] = {"seeds": len(items), "clients": sum(len(i.clients) for i in items)}
    means["mean gain"] = statistics.fmean(item.mean for item in items)
    figures = average_figures(items)
    return means | {name: "" if mean is None else mean for name, mean in figures.items()}


def _describe(items: Sequence[Benefit], means: Mapping[str, Any]) -> list[str]:
    """Return the cells of a row; the mean gain with its interval over seeds.

    Args:
        items: The benefit for each seed.
        means: The figures of :func:`_average`.
    """
    interval = t_interval([item.mean for item in items])
    texts = [str(len(items)), format_estimate(interval, max(3, choose_decimals([interval])), True)]
    for name in describe_benefit(items[0]):
        number = means[name]
        is_share = name in _SHARES
        texts.append(
            _NONE if number == "" else f"{number:.0%}" if is_share else format_number(number, 3)
        )
    return texts


def _explain(benefit: StudyBenefit) -> tuple[str, ...]:
    """Return the sentences below the table."""
    model = "of its personal model, or of the global one without any"
    model = "of the global model" if benefit.is_global else model
    notes = [
        f"Differences of the test {benefit.metric} of each benign client from that by"
        f" {benefit.local} under the same condition and seed: {model}. Positive numbers are gains.",
        "Figures are means over seeds; mean gain ± half of the 95 % interval over seeds. The mean"
        " loss and the largest loss of one client are means over the seeds in which a client"
        " loses. Correlations are Spearman's, of a client's gain; the one with local results is"
        " below 0 by chance alone where test sets are small.",
    ]
    texts = [f"{number} {reason}" for reason, number in benefit.missing.items() if number]
    return (*notes, *([f"Runs that are left out: {', '.join(texts)}."] if texts else []))


def list_clients(
    benefit: StudyBenefit, cells: Sequence[tuple[Cell, Row, CellFolder]], layout: Layout
) -> Iterator[dict[str, Any]]:
    """Yield a row for each client: its results with and without the federation, and its gain."""
    for cell, row, _ in cells:
        key = layout.find_method(row), layout.find_condition(row), str(row[SEED])
        if row["status"] != State.DONE or key not in benefit.by_cell:
            continue
        item = benefit.by_cell[key]
        columns = (item.clients, item.train_samples, item.alone, item.joined, item.gains)
        for numbers in zip(*(column.tolist() for column in columns)):
            names = ("client", "train_samples", "alone", "joined", "gain")
            yield join_columns({**cell.values, SEED: str(cell.seed)}, dict(zip(names, numbers)))
