"""Results of Ditto's tables: the runs of a folder, by the rows of the paper's tables."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.experiment import Row, group_rows, read_csv

HERE = Path(__file__).parent
CONDITIONS = (
    *("clean", "A1_20", "A1_50", "A1_80", "A2_20", "A2_50", "A2_80"),
    *("A3_10", "A3_20", "A3_50"),
)
GLOBAL = ("fair", "median", "Krum", "multi-Krum", "clipping", "k-norm", "k-loss")
EPSILONS = tuple(f"FedMGDA+, ε = {epsilon:g}" for epsilon in (0.0, 0.1, 0.5, 1.0))
DEFENCES = (*GLOBAL, *EPSILONS)
WEAK, STRONG = (0.1, 1.0, 2.0), (0.05, 0.1, 0.2)  # the clients' choices of λ
MIN_VALIDATION = 4  # validation samples that a client needs to choose λ
ATTACK_WORDS = {"A1": "label poisoning", "A2": "random updates", "A3": "model replacement"}


def name_ditto(lam: float) -> str:
    """Return the name of the method Ditto with a λ."""
    return f"Ditto, λ = {lam:g}"


ROWS = {  # of the paper: our methods, of which validation takes the best, and the model
    "local": (("local",), "personal"),
    **{name: ((name,), "global") for name in GLOBAL},
    "FedMGDA+": (EPSILONS, "global"),
    "MOCHA": (("MOCHA",), "personal"),
    "finetuning": (("finetuning",), "personal"),
    **{f"Ditto, lambda={lam}": ((name_ditto(lam),), "personal") for lam in (0.1, 1, 2)},
    "best_lambda": (tuple(map(name_ditto, WEAK)), "personal"),
}
REPEATED = ("best_lambda", "dynamic_lambda")  # rows that repeat other rows
ORDER = ("global", *ROWS, "dynamic_lambda")
NAMES = {
    "global": "FedAvg and Ditto's global model",
    "local": "local training",
    "fair": "fair aggregation (TERM)",
    "best_lambda": "Ditto, best λ by validation",
    "dynamic_lambda": "Ditto, each client's own λ",
}


def is_strong(condition: str) -> bool:
    """Return whether clients choose small λ (Appendix D.2): A3, or a Byzantine majority."""
    return condition.startswith("A3") or condition.endswith("80")


def choices_of(condition: str) -> tuple[float, ...]:
    """Return the clients' choices of λ."""
    return STRONG if is_strong(condition) else WEAK


def fallback_of(condition: str) -> float:
    """Return the λ of clients with too few validation samples for a choice."""
    return 0.1 if is_strong(condition) else 1.0


def describe(condition: str) -> str:
    """Return a condition in words."""
    attack, _, percent = condition.partition("_")
    return f"{ATTACK_WORDS[attack]} ({attack}), {percent} %" if percent else condition


def describe_row(name: str) -> str:
    """Return a row of the paper in words."""
    return NAMES.get(name, name.replace("lambda=", "λ = "))


class Results:
    """Results of the runs, by condition and by rows of the paper.

    Args:
        rows: Rows of the runs.
        clients: Rows of the benign clients in the runs of Ditto.
    """

    def __init__(self, rows: Iterable[Row], clients: Iterable[Row] = ()) -> None:
        self.runs = {(row["condition"], row["method"], row["seed"]): row for row in rows}
        present = {condition for condition, _, _ in self.runs}
        self.conditions = [condition for condition in CONDITIONS if condition in present]
        self.seeds = sorted({seed for _, _, seed in self.runs}, key=int)
        self.clients = dict(group_rows(clients, "condition", "method", "seed"))

    @classmethod
    def read(cls, name: str) -> "Results":
        """Return the committed results of a table, such as ``vehicle``."""
        return cls(*(read_csv(HERE / name / file) for file in ("results.csv", "clients.csv")))

    def values(self, condition: str, row: str, column: str) -> list[float]:
        """Return a column's values in a row of the paper, one per seed with such a run."""
        values = (self._value(condition, row, column, seed) for seed in self.seeds)
        return [value for value in values if value is not None]

    def client_values(self, condition: str, row: str) -> list[float]:
        """Return the accuracies of personal models on all benign clients of all seeds.

        Returns an empty list for a row without rows of clients.
        """
        return [
            float(client["accuracy"])
            for seed in self.seeds
            for client in self._clients_of(condition, row, seed)
        ]

    def count_clients(self, condition: str) -> int:
        """Return the number of benign clients with test samples in a run of a condition."""
        return next(len(rows) for key, rows in self.clients.items() if key[0] == condition)

    def _value(self, condition: str, row: str, column: str, seed: str) -> float | None:
        if row == "dynamic_lambda":
            clients = self._clients_of(condition, row, seed)
            return summarize(clients)[column] if clients else None
        run, model = self._best_run(condition, row, seed)
        return float(run[f"test/{model}/{column}"]) if run else None

    def _best_run(self, condition: str, row: str, seed: str) -> tuple[Row | None, str]:
        """Return the run of a row of the paper, the best by validation among several."""
        # Ditto's global model is FedAvg's for every λ
        fedavg = ((name_ditto(fallback_of(condition)),), "global")
        methods, model = fedavg if row == "global" else ROWS[row]
        runs = [self.runs.get((condition, method, seed)) for method in methods]
        complete = [run for run in runs if run is not None]
        if len(complete) < len(runs):
            return None, model
        validation = f"val/{model}/accuracy_weighted"
        return max(complete, key=lambda run: float(run.get(validation) or 0)), model

    def _clients_of(self, condition: str, row: str, seed: str) -> list[Row]:
        if row == "dynamic_lambda":
            keys = [(condition, name_ditto(lam), seed) for lam in choices_of(condition)]
            runs = [self.clients[key] for key in keys if key in self.clients]
            return choose_lam(runs, condition) if len(runs) == len(keys) else []
        run, model = self._best_run(condition, row, seed)
        has_clients = run is not None and model == "personal"
        return self.clients.get((condition, run["method"], seed), []) if has_clients else []


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
