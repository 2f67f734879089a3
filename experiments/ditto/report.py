"""Report of Ditto's Tables 1, 5, 7 and 9 from the rows of the runs.

python -m experiments.ditto.report vehicle
"""

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from scipy.stats import spearmanr

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
from experiments.tables import (
    Comparison,
    fold,
    format_mean_and_std,
    markdown,
    notes,
    tabulate_misses,
)

HERE = Path(__file__).parent
BANDS: dict[str, dict[str, float]] = {
    "fashion": {"clean": 0.015, "A1": 0.015, "A2": 0.05, "A3": 0.05},
    "fashion_small": {},
    "fashion_small_pixels": {},
    "vehicle": dict.fromkeys(("clean", "A1", "A2", "A3"), 0.05),
    "vehicle_rounded_down": dict.fromkeys(("A1", "A2", "A3"), 0.05),
}
PAPER = {  # folders without a paper.csv → the folder of the paper's figures
    "fashion_small": "fashion",
    "fashion_small_pixels": "fashion",
    "vehicle_rounded_down": "vehicle",
}
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

    def _value(self, condition: str, row: str, column: str, seed: str) -> float | None:
        if row == "dynamic_lambda":
            runs = [(condition, name, seed) for name in map(ditto, choices_of(condition))]
            if any(run not in self.clients for run in runs):
                return None
            return own_lam([self.clients[run] for run in runs], condition)[column]
        if row == "best_lambda":
            methods, model = [ditto(lam) for lam in WEAK], "personal"
        elif row == "global":  # Ditto's global model is FedAvg's for every λ
            methods, model = [ditto(fallback_of(condition))], "global"
        else:
            method, model = ROWS[row]
            methods = [name for name in DEFENCES if name.split(", ε")[0] == method] or [method]
        rows = {
            r["method"]: r for r in self.rows if (r["condition"], r["seed"]) == (condition, seed)
        }
        if not rows.keys() >= {*methods}:
            return None
        runs = [rows[name] for name in methods]
        best = max(runs, key=lambda run: float(run.get(f"{model}_validation") or 0))
        return float(best[f"{model}_{column}"])


def own_lam(clients: Sequence[Sequence[Row]], condition: str) -> dict[str, float]:
    """Return accuracies if each client takes the λ with its best validation in the last round.

    Computes :class:`pl_fed.clients.DittoChoice` from one run per λ, because the global model and
    the minibatches of a client are the same in all of these runs.

    Args:
        clients: For each λ among the choices, the rows of the clients.
        condition: The condition.
    """
    fallback = choices_of(condition).index(fallback_of(condition))
    accuracies, samples = [], []
    for runs in zip(*clients):
        best = min(runs, key=lambda run: float(run["val_loss"]))
        can_choose = int(best["val_samples"]) >= MIN_VALIDATION
        accuracies.append(float((best if can_choose else runs[fallback])["accuracy"]))
        samples.append(int(best["test_samples"]))
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


def figures(name: str) -> dict[tuple[str, str], Comparison]:
    """Return the comparisons of a folder's committed runs, by condition and row."""
    return comparisons(results_of(name), read(HERE / name / "paper.csv"), BANDS[name])


def comparisons(
    results: Results, paper: Iterable[Row], bands: Mapping[str, float]
) -> dict[tuple[str, str], Comparison]:
    """Return comparisons with the paper, by condition and row; none without a band."""
    compared = {}
    for row in paper:
        band = bands.get(row["condition"].split("_")[0])
        ours = results.values(row["condition"], row["row"], "accuracy_weighted")
        if ours and band is not None:
            comparison = Comparison(float(row["mean"]), None, ours, band)
            compared[row["condition"], row["row"]] = comparison
    return compared


def table(
    results: Results,
    paper: Iterable[Row],
    compared: Mapping[tuple[str, str], Comparison],
    condition: str,
) -> str:
    """Return the table of a condition; without a band, compares the order of the rows instead.

    Returns an empty text if no row has results.
    """
    theirs = {row["row"]: row for row in paper if row["condition"] == condition}
    rows, banded, pairs = [], [], []
    for name in ORDER:
        ours = results.values(condition, name, "accuracy_weighted")
        if not ours:
            continue
        cells = [describe_row(name)]
        if (condition, name) in compared:
            banded.append(compared[condition, name])
            cells += banded[-1].cells(3)
        else:
            mean = f"{float(theirs[name]['mean']):.3f}" if name in theirs else "–"
            cells += [mean, format_mean_and_std(ours, 3), ""]
            if name in theirs and name not in REPEATED:
                pairs.append((float(theirs[name]["mean"]), statistics.mean(ours)))
        unweighted = format_mean_and_std(results.values(condition, name, "accuracy"), 3)
        std = format_mean_and_std(results.values(condition, name, "accuracy_std"), 3)
        cells += [unweighted, f"{float(theirs[name]['std']):.2f}" if name in theirs else "–", std]
        rows.append(cells)
    if not rows:
        return ""
    head = ["", "the paper", "ours", "difference", "ours, mean over devices"]
    head += ["std over devices, the paper", "ours"]
    verdict = ""
    if banded:
        agree = sum(comparison.agrees for comparison in banded)
        verdict = f": {agree} of {len(banded)} agree (within {banded[0].band})"
    elif len(pairs) > 2:
        correlation = spearmanr(pairs).statistic
        verdict = f": rank correlation with the paper {correlation:.2f} ({len(pairs)} rows)"
    words = describe(condition)
    title = f"## {words[0].upper()}{words[1:]}{verdict}"
    return f"{title}\n\n" + fold("All methods", markdown(head, rows))


def write(name: str) -> None:
    """Write the table of a folder."""
    folder = HERE / name
    results = results_of(name)
    paper = read(HERE / PAPER.get(name, name) / "paper.csv")
    hours = sum(float(row["seconds"]) for row in results.rows) / 3600
    text = (folder / "head.md").read_text()
    seeds = {"seeds": ", ".join(results.seeds), "seeds_n": len(results.seeds)}
    compared = comparisons(results, paper, BANDS[name])
    named = {
        f"{describe(condition)}: {describe_row(row)}": comparison
        for (condition, row), comparison in compared.items()
    }
    text = text.format(
        runs=len(results.rows),
        hours=hours,
        agree=sum(comparison.agrees for comparison in named.values()),
        compared=len(named),
        misses=tabulate_misses(named, 3),
        **seeds,
    )
    tables = (table(results, paper, compared, condition) for condition in results.conditions)
    parts = [text for text in tables if text]
    (folder / "table.md").write_text(text + "\n" + "\n".join(parts) + notes(folder))
    print(f"{folder / 'table.md'}: {len(results.rows)} runs")


if __name__ == "__main__":
    write(sys.argv[1])
