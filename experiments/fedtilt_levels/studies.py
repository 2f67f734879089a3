"""A setting where FedTilt's two-level fairness can be told from Ditto's.

PL_FED_DATA=../data python -m experiments fedtilt_levels
"""

import functools
import statistics
from typing import Any

from experiments.experiment import (
    CellRun,
    Content,
    Experiment,
    Row,
    group_rows,
    read_csv,
    read_study,
    shorten,
)
from experiments.fedtilt_levels.page import DITTO, HERE, SMALL_STEPS, write
from pl_fed.studies.cells import Cell

PULLS = {"remain": 0.1, "vanish": 0.001, SMALL_STEPS: 0.1}  # Ditto's λ and FedTilt's μ


@functools.cache
def choose_rates() -> dict[tuple[str, ...], float]:
    """Return the learning rate with the best validation accuracy by sizes, losses and method."""
    return {
        key: float(max(rows, key=lambda row: float(row["personal_validation"]))["lr"])
        for key, rows in group_rows(read_csv(HERE / "select.csv"), "sizes", "losses", "method")
    }


def choose_values(cell: Cell) -> Content:
    """Return the learning rate of a cell, and the pull of its method to the global model."""
    losses, method = cell.values["losses"], cell.values["method"]
    key = (cell.values["sizes"], losses, method)
    return {
        "model.optimizer.lr": 0.005 if losses == SMALL_STEPS else choose_rates()[key],
        "model.lam" if method == DITTO else "model.mu": PULLS[losses],
    }


def collect(run: CellRun) -> dict[str, list[Row]]:
    """Return the row of a run, and the test results of each client's personal model.

    ``accuracy`` is over test classes of equal size, ``own_accuracy`` in the proportions of the
    client's own training classes, and ``class_std`` the population deviation over its classes.
    """
    tested = dict(group_rows(run.read("per_class.csv"), "client"))
    trained = dict(group_rows(run.read("train_classes.csv"), "client"))
    rows = []
    for client in run.read("per_client.csv"):
        key = (client["client"],)
        accuracies = {row["class"]: float(row["personal_accuracy"]) for row in tested[key]}
        samples = {row["class"]: int(row["samples"]) for row in trained[key]}
        own = sum(samples.get(name, 0) * value for name, value in accuracies.items())
        values = {
            "accuracy": statistics.fmean(accuracies.values()),
            "own_accuracy": own / sum(samples.values()),
            "class_std": statistics.pstdev(accuracies.values()),
            "worst_class": min(accuracies.values()),
        }
        numbers = {name: shorten(value) for name, value in values.items()}
        rows.append({"client": client["client"], "rounds": client["rounds"], **numbers})
    return {"results.csv": [run.select("test/personal/class_std_mean")], "clients.csv": rows}


def make(**options: Any) -> Experiment:
    """Return the experiment: 320 runs."""
    content = read_study(HERE / "study.yaml")
    return Experiment("fedtilt_levels", content, collect, write, options, adjust=choose_values)


EXPERIMENTS = {"fedtilt_levels": make}
