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
    """Return the results of the benign clients with samples; none if the run lacks the metric.

    They are NaN or infinite for clients whose models have diverged: then so is the run's mean over
    clients. If that is finite, the metric of a client with NaN is undefined, such as the area
    under the curve of a single class, and the client is left out, as in that mean.
    """
    column, name = f"{model}_{metric}", f"test/{model}/{metric}"
    if column not in run.clients:
        return np.empty(0)
    values: NDArray[np.float64] = run.clients[column]
    is_result, mean = ~np.isnan(values), run.final(name)
    if mean is None or not np.isfinite(mean) or run.is_undefined(name):
        is_result |= run.clients.get("test_samples", np.zeros(len(values))) > 0
    return values[run.benign & is_result]


def _mean(numbers: Sequence[float]) -> float | None:
    return float(np.mean(numbers)) if np.isfinite(numbers).all() else None
