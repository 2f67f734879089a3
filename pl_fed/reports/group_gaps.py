"""Gaps between groups of samples in a report, such as those of a sex or an age band."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pl_fed.reports.group import Group, list_models
from pl_fed.reports.run import Run

_FIGURES = {
    "demographic_parity": "demographic parity gap",
    "equalized_odds": "equalized odds gap",
    "accuracy_gap": "accuracy gap",
    "accuracy_worst": "accuracy of the worst group",
}


def measure_gaps(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Yield the gaps between groups of samples by group of runs and model; means over the seeds."""
    for group in groups:
        for model in list_models([group], "test"):
            place = f"test/{model}/group"
            row = {title: _mean(group, f"{place}/{name}") for name, title in _FIGURES.items()}
            row |= {
                f"{title}, mean over clients": _mean(group, f"{place}/client_{name}")
                for name, title in _FIGURES.items()
            }
            row |= {
                f"clients without {title}": _count(group, f"{place}/client_{name}_undefined")
                for name, title in _FIGURES.items()
            }
            if any(number is not None for number in row.values()):
                yield {"group": group.number, "name": group.label, "model": model, **row}


def _mean(group: Group, metric: str) -> float | None:
    """Return the mean of a metric over the seeds; ``None`` if it is undefined for one of them."""
    final = group.final(metric)
    return final.mean if final is not None and np.isfinite(final.mean) else None


def _count(group: Group, metric: str) -> float | None:
    """Return the mean of a count over the seeds, as an integer if it is one."""
    mean = _mean(group, metric)
    return int(mean) if mean is not None and mean.is_integer() else mean


def measure_groups(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Yield the accuracy of each model on each group of samples, by group of runs."""
    for group in groups:
        runs = group.first_of_seeds(run for run in group.tested_runs if run.sample_groups)
        names = dict.fromkeys(name for run in runs for name in run.group_names)
        for name in names:
            models = [
                column.removesuffix("_accuracy")
                for column in runs[0].sample_groups
                if column.endswith("_accuracy")
            ]
            yield {
                "group": group.number,
                "name": group.label,
                "samples of": name,
                "clients": int(_select(runs[0], name).sum()),
                "samples": _average([_measure(run, name, "samples") for run in runs]),
                **{
                    f"{model} accuracy": _average([_measure(run, name, model) for run in runs])
                    for model in models
                },
            }


def _select(run: Run, name: str) -> Any:
    """Return a mask of the rows of benign clients with a group, bool [rows]."""
    is_benign = run.sample_groups["byzantine"] == 0
    return is_benign & (np.array(run.group_names) == name)


def _measure(run: Run, name: str, model: str) -> float:
    """Return the accuracy of a model on a group, or its number of samples; NaN without any."""
    selected = _select(run, name)
    samples = run.sample_groups["samples"][selected]
    if model == "samples":
        return float(samples.sum())
    accuracy = run.sample_groups[f"{model}_accuracy"][selected]
    return float((samples * accuracy).sum() / samples.sum()) if samples.any() else np.nan


def _average(numbers: Sequence[float]) -> float | None:
    defined = [number for number in numbers if np.isfinite(number)]
    return float(np.mean(defined)) if defined else None
