"""Results of Ditto's tables: the runs of a folder, by the rows of the paper's tables."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.ditto.run import (
    ALL,
    DEFENCES,
    MIN_VALIDATION,
    WEAK,
    choices_of,
    ditto,
    fallback_of,
)
from experiments.grid import Row, finished_rows, group_rows, read

HERE = Path(__file__).parent
GLOBAL = ["fair", "median", "Krum", "multi-Krum", "clipping", "k-norm", "k-loss"]
ROWS = {  # of the paper: our method, and the model
    "local": ("local", "personal"),
    **{name: (name, "global") for name in GLOBAL},
    "FedMGDA+": ("FedMGDA+", "global"),
    "MOCHA": ("MOCHA", "personal"),
    "finetuning": ("finetuning", "personal"),
    **{f"Ditto, lambda={lam}": (ditto(lam), "personal") for lam in (0.1, 1, 2)},
}
REPEATED = ("best_lambda", "dynamic_lambda")  # rows that repeat other rows
ORDER = ["global", *ROWS, *REPEATED]
ATTACK_WORDS = {"A1": "label poisoning", "A2": "random updates", "A3": "model replacement"}
NAMES = {
    "global": "FedAvg and Ditto's global model",
    "local": "local training",
    "fair": "fair aggregation (TERM)",
    "best_lambda": "Ditto, best λ by validation",
    "dynamic_lambda": "Ditto, each client's own λ",
}


class Results:
    """Results of the runs, by condition.

    Args:
        rows: Rows of the successful runs.
        clients: Rows of the clients in the runs of Ditto.
    """

    def __init__(self, rows: Iterable[Row], clients: Iterable[Row] = ()) -> None:
        self.rows = list(rows)
        conditions = {row["condition"] for row in self.rows}
        self.conditions = [condition for condition in ALL if condition in conditions]
        self.seeds = sorted({row["seed"] for row in self.rows}, key=int)
        self.clients = dict(group_rows(clients, "condition", "method", "seed"))

    def values(self, condition: str, row: str, column: str) -> list[float]:
        """Return a column's values in a row of the paper, one per seed with such a run."""
        values = (self._value(condition, row, column, seed) for seed in self.seeds)
        return [value for value in values if value is not None]

    def client_values(self, condition: str, row: str) -> list[float]:
        """Return the accuracies of personal models on all benign clients of all seeds.

        Returns an empty list for a row without rows of clients.
        """
        return [a for seed in self.seeds for a in self._client_accuracies(condition, row, seed)]

    def count_clients(self, condition: str) -> int:
        """Return the number of benign clients with test samples in a run of a condition."""
        runs = [rows for (c, *_), rows in self.clients.items() if c == condition]
        return len(runs[0]) if runs else 0

    def add_ditto(self, other: "Results") -> "Results":
        """Return these results with the runs of Ditto of another folder, on the same clients."""
        own = [row for row in other.rows if row["method"].startswith("Ditto")]
        return Results(
            [*self.rows, *(row for row in own if row["condition"] in self.conditions)],
            [client for rows in other.clients.values() for client in rows],
        )

    def _value(self, condition: str, row: str, column: str, seed: str) -> float | None:
        if row == "dynamic_lambda":
            clients = self._clients_of_choices(condition, seed)
            return summarize(choose_lam(clients, condition))[column] if clients else None
        best = self._best_run(condition, row, seed)
        return float(best[f"{model_of(row)}_{column}"]) if best else None

    def _best_run(self, condition: str, row: str, seed: str) -> Row | None:
        """Return the run of a row of the paper, the best by validation among several."""
        if row == "best_lambda":
            methods = [ditto(lam) for lam in WEAK]
        elif row == "global":  # Ditto's global model is FedAvg's for every λ
            methods = [ditto(fallback_of(condition))]
        else:
            method, _ = ROWS[row]
            methods = [name for name in DEFENCES if name.split(", ε")[0] == method] or [method]
        rows = {
            r["method"]: r for r in self.rows if (r["condition"], r["seed"]) == (condition, seed)
        }
        if not rows.keys() >= {*methods}:
            return None
        validation = f"{model_of(row)}_validation"
        return max(
            (rows[name] for name in methods), key=lambda run: float(run.get(validation) or 0)
        )

    def _client_accuracies(self, condition: str, row: str, seed: str) -> list[float]:
        if row == "dynamic_lambda":
            clients = self._clients_of_choices(condition, seed)
            return [float(client["accuracy"]) for client in choose_lam(clients, condition)]
        best = self._best_run(condition, row, seed) if model_of(row) == "personal" else None
        clients = self.clients.get((condition, best["method"], seed), []) if best else []
        return [float(client["accuracy"]) for client in clients]

    def _clients_of_choices(self, condition: str, seed: str) -> list[list[Row]]:
        """Return the rows of the clients for each λ among the choices; none if a run is missing."""
        runs = [(condition, ditto(lam), seed) for lam in choices_of(condition)]
        return [self.clients[run] for run in runs] if {*runs} <= self.clients.keys() else []


def model_of(row: str) -> str:
    """Return the model that a row of the paper is about."""
    if row == "global":
        return "global"
    return "personal" if row in REPEATED else ROWS[row][1]


def own_lam(clients: Sequence[Sequence[Row]], condition: str) -> dict[str, float]:
    """Return accuracies if each client takes the λ with its best validation in the last round.

    Args:
        clients: For each λ among the choices, the rows of the clients.
        condition: The condition.
    """
    return summarize(choose_lam(clients, condition))


def choose_lam(clients: Sequence[Sequence[Row]], condition: str) -> list[Row]:
    """Return each client's row for the λ with its best validation in the last round.

    Computes :class:`pl_fed.clients.DittoChoice` from one run per λ, because the global model and
    the minibatches of a client are the same in all of these runs.

    Args:
        clients: For each λ among the choices, the rows of the clients.
        condition: The condition.
    """
    fallback = choices_of(condition).index(fallback_of(condition))
    chosen = []
    for runs in zip(*clients):
        best = min(runs, key=lambda run: float(run["val_loss"]))
        can_choose = int(best["val_samples"]) >= MIN_VALIDATION
        chosen.append(best if can_choose else runs[fallback])
    return chosen


def summarize(clients: Sequence[Row]) -> dict[str, float]:
    """Return the accuracy over samples, and the mean and standard deviation over clients."""
    accuracies = [float(client["accuracy"]) for client in clients]
    samples = [int(client["test_samples"]) for client in clients]
    correct = sum(accuracy * n for accuracy, n in zip(accuracies, samples))
    return {
        "accuracy_weighted": correct / sum(samples),
        "accuracy": statistics.mean(accuracies),
        "accuracy_std": statistics.pstdev(accuracies),
    }


def describe(condition: str) -> str:
    """Return a condition in words."""
    attack, _, percent = condition.partition("_")
    return f"{ATTACK_WORDS[attack]} ({attack}), {percent} %" if percent else condition


def describe_row(name: str) -> str:
    """Return a row of the paper in words."""
    return NAMES.get(name, name.replace("lambda=", "λ = "))


def results_of(name: str) -> Results:
    """Return the results of a folder's committed runs."""
    return Results(finished_rows(HERE / name / "results.csv"), read(HERE / name / "clients.csv"))
