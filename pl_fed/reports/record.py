"""A run's files as plain Python and numpy, for notebooks and scripts."""

import copy
import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pl_fed.reports import run as run_files

Table = dict[str, NDArray[Any]]


class RunRecord(NamedTuple):
    """Record of a run.

    Attributes:
        config: ``config.yaml``, or ``python_config.yaml`` of a run from Python; empty without any.
        metrics: The columns of ``metrics.csv``, float64 [rows]; NaN where a round has no value.
        clients: The columns of ``per_client.csv``, float64 [clients], and columns of text, such as
            ``owner``; empty before a test.
        classes: The columns of ``per_class.csv``, float64 [rows], and of names, text [rows]; empty
            without the file.
        summary: ``summary.json``. Without the file, as of a killed run, it has ``metrics`` alone:
            the last ones of ``metrics.csv``.
        held_out: The columns of ``per_client.csv`` of held-out clients; ``clients`` has the
            others. It is empty if all clients train.
        groups: The columns of ``per_group.csv``, float64 [rows], and the names of the groups, text
            [rows]; empty without groups of samples.
    """

    config: dict[str, Any]
    metrics: Table
    clients: Table
    classes: Table
    summary: dict[str, Any]
    held_out: Table = {}
    groups: Table = {}


def read_run(folder: str | Path) -> RunRecord:
    """Return the results of a run from its folder.

    Args:
        folder: The run's folder.

    Raises:
        FileNotFoundError: If the folder has no ``metrics.csv``.
        ValueError: If a run of pl_fed cannot have written a file.

    Example: accuracies of the benign clients' personal models. ::

        run = pl_fed.read_run("runs/quickstart/20260101-120000")
        accuracy = run.clients["personal_accuracy"][run.clients["byzantine"] == 0]
    """
    folder = Path(folder)
    if not (folder / "metrics.csv").is_file():
        raise FileNotFoundError(
            "Expected argument `folder` to be a run's folder, with a metrics.csv, but got"
            f" {folder}."
        )
    run = run_files.read_run(folder)
    names = dict.fromkeys(name for row in run.rows.values() for name in row)
    metrics = {"round": np.array(list(run.rows), dtype=np.float64)} | {
        name: np.array([row.get(name, np.nan) for row in run.rows.values()]) for name in names
    }
    texts = {name: np.array(cells) for name, cells in run.attributes.items()}
    clients: Table = {**run.clients, **texts}
    classes: Table = dict(run.classes)
    for table, file in ((clients, "per_client.csv"), (classes, "per_class.csv")):
        for name in ("owner", "class_name"):
            if name in table:
                table[name] = _read_names(folder / file, name)
    groups: Table = dict(run.sample_groups)
    if groups:
        groups["group"] = np.array(run.group_names)
    held_out: Table = dict(run.held_out)
    if "owner" in clients:  # held-out clients follow the training clients
        owners, number = clients["owner"], len(run.benign)
        clients["owner"] = owners[:number]
        if held_out:
            held_out["owner"] = owners[number:]
    return RunRecord(
        copy.deepcopy(dict(run.config)),
        metrics,
        clients,
        classes,
        _read_summary(folder / "summary.json") or {"metrics": _last_metrics(run.rows)},
        held_out,
        groups,
    )


def _last_metrics(rows: Mapping[int, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the last metrics of each part by name without the part, and their round."""
    metrics: dict[str, dict[str, float]] = {"test": {}, "val": {}}
    for round, row in rows.items():
        for part in metrics:
            names = (name for name in row if name.startswith(f"{part}/"))
            if values := {name.removeprefix(f"{part}/"): row[name] for name in names}:
                metrics[part] = {"round": round, **values}
    return metrics


def _read_names(path: Path, column: str) -> NDArray[np.str_]:
    """Return the texts in a column of a table."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        names = (row[column] for row in csv.DictReader(file))
        return np.array([name.removeprefix("'") for name in names])


def _read_summary(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"Expected {path} to hold a JSON object but got none: {error}.") from None
    if not isinstance(summary, dict):
        raise ValueError(f"Expected {path} to hold a JSON object but got {summary!r}.")
    return summary
