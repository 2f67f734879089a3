"""The equality of clients' results in a report: figures of fairness from ``per_client.csv``."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pl_fed.functional.client_figures import read_figures
from pl_fed.reports.group import Group, is_higher_better, list_models, main_metric
from pl_fed.reports.run import Run

_FIGURES = read_figures(
    [
        *("worst1", "worst5", "worst20", "q25", "q50", "q75", "gap", "gini", "cv"),
        "normalized_entropy",
    ]
)
_HEADINGS = {
    **{f"worst{percent}": f"worst {percent} %" for percent in (1, 5, 20)},
    "q25": "lower quartile",
    "q50": "median",
    "q75": "upper quartile",
    "normalized_entropy": "entropy / ln n",
}


def measure_equality(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Yield the figures of the clients' results by group and model; means over the seeds.

    A figure is ``None`` if it is undefined in a run.
    """
    metric = main_metric(groups, "test")
    for group in groups:
        for model in list_models([group], "test"):
            tested = [run for run in group.tested_runs if len(_list_results(run, model, metric))]
            runs = group.first_of_seeds(tested)
            if not runs:
                continue
            is_higher = is_higher_better(group.runs, metric)
            measured = [_measure(run, model, metric, is_higher) for run in runs]
            means = {name: _mean([row[name] for row in measured]) for name in measured[0]}
            yield {"group": group.number, "name": group.label, "model": model, **means}


def _measure(run: Run, model: str, metric: str, is_higher: bool | None) -> dict[str, float]:
    """Return the figures of one run by their headings; NaN where undefined."""
    values, figures = _list_results(run, model, metric), {}
    for figure in _FIGURES:
        is_known = is_higher is not None or not figure.is_ranked
        number = figure.compute(values, is_higher) if is_known else np.nan
        figures[_HEADINGS.get(figure.name, figure.name)] = number
    losses = _list_results(run, model, "loss")
    if metric != "loss":
        is_finite = len(losses) and np.isfinite(losses).all()
        figures["loss gap"] = float(np.ptp(losses)) if is_finite else np.nan
    return figures


def _list_results(run: Run, model: str, metric: str) -> NDArray[np.float64]:
    """Return the results of the benign clients; none if the run lacks the metric.

    They are NaN or infinite for clients whose models have diverged.
    """
    column = f"{model}_{metric}"
    if column not in run.clients:
        return np.empty(0)
    results: NDArray[np.float64] = run.clients[column][run.benign & run.mark_results(model, metric)]
    return results


def _mean(numbers: Sequence[float]) -> float | None:
    return float(np.mean(numbers)) if np.isfinite(numbers).all() else None
