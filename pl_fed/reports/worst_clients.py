"""Correlations of clients' results with their sizes, classes, participation and distances."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pl_fed.functional.rank_correlation import rank_correlation
from pl_fed.reports.comparisons import main_model
from pl_fed.reports.group import Group, is_lower_better, main_metric
from pl_fed.reports.run import Run


def explain_results(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Yield the rank correlations of each group's results with properties of its clients."""
    metric = main_metric(groups, "test")
    for group in groups:
        model = main_model(group)
        column = f"{model}_{metric}"
        runs = group.first_of_seeds(run for run in group.tested_runs if column in run.clients)
        tables = [_valid_rows(run, column) for run in runs]
        tables = [table for table in tables if len(table["result"])]
        if not tables:
            continue
        sign = -1 if is_lower_better(group.runs, metric) else 1
        shared_names = set.intersection(*map(set, tables))
        properties = [name for name in tables[0] if name in shared_names - {"result"}]
        correlations = {}
        for name in properties:
            values = [sign * rank_correlation(table["result"], table[name]) for table in tables]
            correlations[name] = float(np.mean(values)) if np.isfinite(values).all() else None
        if any(value is not None for value in correlations.values()):
            yield {"group": group.number, "name": group.label, "model": model, **correlations}


def _valid_rows(run: Run, column: str) -> dict[str, NDArray[np.float64]]:
    """Return the results and the properties of a run's benign clients with a result."""
    valid = run.benign & np.isfinite(run.clients[column])
    properties = {"training samples": "train_samples", "rounds": "rounds"}
    table = {"result": run.clients[column]}
    table |= {name: run.clients[c] for name, c in properties.items() if c in run.clients}
    if run.classes:
        counts = count_classes(run)
        shares = counts / counts.sum(1, keepdims=True).clip(1)
        overall = counts.sum(0) / counts.sum()
        table["classes"] = (counts > 0).sum(1).astype(np.float64)
        table["distance"] = np.abs(shares - overall).sum(1) / 2
    return {name: values[valid] for name, values in table.items()}


def count_classes(run: Run) -> NDArray[np.float64]:
    """Return the test samples of each client and class, [clients, classes]."""
    clients = run.classes["client"].astype(np.int64)
    classes = run.classes["class"].astype(np.int64)
    counts = np.zeros((len(run.benign), int(classes.max(initial=0)) + 1))
    fits = clients < len(counts)
    np.add.at(counts, (clients[fits], classes[fits]), run.classes["samples"][fits])
    return counts
