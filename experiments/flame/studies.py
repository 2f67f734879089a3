"""FLAME's tables and figures as studies: Table III, attacks (4 to 7) and parameters (9 to 12)."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from experiments.experiment import CellRun, Experiment, Row, read_study, shorten
from experiments.flame import page, pictures
from experiments.flame.results import HERE, Results
from experiments.make_cifar10_npz import write_if_missing
from pl_fed.data.folders import data_root

MODELS = ("global", "lagged_global", "personal", "hybrid")


class Table3(Experiment):
    """Table III; its workers need CIFAR-10 as one file."""

    def open_pool(self, workers: int | None = None, cells: int | None = None) -> Any:
        """Write CIFAR-10 if it is missing, and start workers on this machine."""
        write_if_missing(data_root(None))
        return super().open_pool(workers, cells)


def select_columns(row: Mapping[str, str], models: Iterable[str], name: str) -> Row:
    """Return the accuracy and the loss of some models.

    Args:
        row: A row of a run's file.
        models: The models.
        name: The name of a column with places for the model and the metric.
    """
    return {
        f"{model}_{metric}": shorten(row[name.format(model, metric)])
        for model in models
        for metric in ("accuracy", "loss")
    }


def collect_table(run: CellRun) -> dict[str, list[Row]]:
    """Return the rows of a run of Table III: its results, clients and curves."""
    models = [model for model in MODELS if f"test/{model}/accuracy" in run.row]
    metrics = ("accuracy", "accuracy_std", "loss", "loss_var")
    columns = [f"test/{model}/{metric}" for model in models for metric in metrics]
    old = "lagged_global" if "lagged_global" in models else "global"
    clients = run.read("per_client.csv")
    best = [max(float(c["personal_accuracy"]), float(c[f"{old}_accuracy"])) for c in clients]
    by_test = {"hybrid_by_test_accuracy": shorten(statistics.mean(best))}
    return {
        "results.csv": [{**run.select(*columns), **by_test}],
        "clients.csv": [
            {name: client[name] for name in ("client", "train_samples", "test_samples")}
            | select_columns(client, models, "{}_{}")
            for client in clients
        ],
        "curves.csv": [
            {"round": row["round"], **select_columns(row, models, "val/{}/{}")}
            for row in run.read("metrics.csv")
            if row.get("val/personal/accuracy")
        ],
    }


def collect_attack(run: CellRun) -> dict[str, list[Row]]:
    """Return the row of a run with its final accuracies."""
    columns = [f"test/{model}/accuracy" for model in ("global", "personal", "hybrid")]
    return {"attacks.csv": [run.select(*columns)]}


def collect_losses(run: CellRun) -> dict[str, list[Row]]:
    """Return the rows of a run with its losses in each round."""
    columns = ("global", "personal")
    rows = [
        {
            "round": row["round"],
            "train_loss": shorten(row["train/loss"]) if row["train/loss"] else "",
            **{f"{model}_loss": shorten(row[f"val/{model}/loss"]) for model in columns},
        }
        for row in run.read("metrics.csv")
        if row.get("val/personal/loss")
    ]
    last = run.select(*(f"test/{model}/loss" for model in columns))
    return {"parameter_curves.csv": rows, "parameters.csv": [last]}


def write_table() -> None:
    """Write table3.md and the pictures of its runs."""
    (HERE / "table3.md").write_text(page.make_page())
    compared = page.compare(Results.read(), page.read_paper())
    pictures.draw_table(compared)
    hybrid = [setting for setting in compared if "hybrid" in setting]
    pictures.draw_curves(hybrid)
    pictures.draw_fairness(hybrid)


def make_table3(**options: Any) -> Experiment:
    """Return Table III: label, quality, quantity and hybrid skew, and five methods."""
    content = read_study(HERE / "table3.yaml")
    return Table3("flame/table3", content, collect_table, write_table, options, HERE)


def make_attacks(**options: Any) -> Experiment:
    """Return Figures 4 to 7: accuracy against the share of attackers."""
    content, write = read_study(HERE / "attacks.yaml"), pictures.draw_attacks
    name, table = "flame/attacks", "attacks.csv"
    return Experiment(name, content, collect_attack, write, options, HERE, table)


def make_parameters(**options: Any) -> Experiment:
    """Return Figures 9 to 12: losses over rounds for λ, H, ρ and s."""
    content, write = read_study(HERE / "parameters.yaml"), pictures.draw_parameters
    name, table = "flame/parameters", "parameters.csv"
    return Experiment(name, content, collect_losses, write, options, HERE, table)


EXPERIMENTS = {
    "flame/table3": make_table3,
    "flame/attacks": make_attacks,
    "flame/parameters": make_parameters,
}
