"""Gaps between groups of clients with different attributes, such as regions or devices."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pl_fed.reports.comparisons import main_model
from pl_fed.reports.group import Group, is_lower_better, main_metric

_MAX_VALUES = 12  # a column with more values identifies clients


def compare_attributes(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Yield the means over the clients with each value of an attribute, by group."""
    metric = main_metric(groups, "test")
    for group in groups:
        model = main_model(group)
        column = f"{model}_{metric}"
        runs = group.first_of_seeds(run for run in group.tested_runs if column in run.clients)
        for attribute in dict.fromkeys(name for run in runs for name in run.attributes):
            results: dict[str, list[float]] = {}
            for run in runs:
                texts = run.attributes.get(attribute, ())
                for text, value, benign in zip(texts, run.clients[column], run.benign):
                    if benign and np.isfinite(value):
                        results.setdefault(text, []).append(float(value))
            if not 2 <= len(results) <= _MAX_VALUES:
                continue
            means = {text: float(np.mean(values)) for text, values in results.items()}
            for text, mean in sorted(means.items()):
                yield {
                    "group": group.number,
                    "name": group.label,
                    "model": model,
                    attribute: text,
                    "clients": len(results[text]),
                    f"mean {metric}": mean,
                    "gap to the best": abs(mean - _best(group, metric, means)),
                }


def _best(group: Group, metric: str, means: dict[str, float]) -> float:
    return min(means.values()) if is_lower_better(group.runs, metric) else max(means.values())
