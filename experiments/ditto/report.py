"""Ditto's Tables 1, 5, 7 and 9 from the runs' rows.

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
from experiments.tables import Comparison, markdown, measured, notes

HERE = Path(__file__).parent
BANDS: dict[str, dict[str, float]] = {
    "fashion": {"clean": 0.015, "A1": 0.015, "A2": 0.05, "A3": 0.05},
    "fashion_small": {},
    "fashion_small_pixels": {},
    "vehicle": dict.fromkeys(("clean", "A1", "A2", "A3"), 0.05),
    "vehicle_rounded_down": dict.fromkeys(("A1", "A2", "A3"), 0.05),
}
PAPER = {  # whose figures are shown
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
ORDER = ["global", *ROWS, "best_lambda", "dynamic_lambda"]
NAMES = {
    "best_lambda": "Ditto, best λ by validation",
    "dynamic_lambda": "Ditto, each client's own λ",
}


class Results:
    """What was measured, by condition.

    Args:
        rows: Of the runs that did not fail.
        clients: Of the clients of those of Ditto.
    """

    def __init__(self, rows: Iterable[Row], clients: Iterable[Row] = ()) -> None:
        self.rows = list(rows)
        found = {row["condition"] for row in self.rows}
        self.conditions = [condition for condition in ALL if condition in found]
        self.seeds = sorted({row["seed"] for row in self.rows}, key=int)
        self.clients = dict(group_rows(clients, "condition", "method", "seed"))

    def values(self, condition: str, row: str, column: str) -> list[float]:
        """Return a column's values of one of the paper's rows, one for each seed that has it."""
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
        elif row == "global":  # Ditto's is FedAvg's, whatever λ is
            methods, model = [ditto(fallback_of(condition))], "global"
        else:
            method, model = ROWS[row]
            methods = [each for each in DEFENCES if each.split(", ε")[0] == method] or [method]
        found = {
            r["method"]: r for r in self.rows if (r["condition"], r["seed"]) == (condition, seed)
        }
        if not found.keys() >= {*methods}:
            return None
        runs = [found[each] for each in methods]
        best = max(runs, key=lambda run: float(run.get(f"{model}_validation") or 0))
        return float(best[f"{model}_{column}"])


def own_lam(clients: Sequence[Sequence[Row]], condition: str) -> dict[str, float]:
    """Return what comes of it if each client takes the λ that validates best, as its last round.

    As :class:`pl_fed.clients.DittoChoice`, of the runs that there are of each λ: the global model
    and a client's minibatches are the same in all of them.

    Args:
        clients: The clients of the run of each λ that they choose from.
        condition: The condition.
    """
    fallback = choices_of(condition).index(fallback_of(condition))
    accuracies, samples = [], []
    for runs in zip(*clients):
        best = min(runs, key=lambda run: float(run["val_loss"]))
        enough = int(best["val_samples"]) >= MIN_VALIDATION
        accuracies.append(float((best if enough else runs[fallback])["accuracy"]))
        samples.append(int(best["test_samples"]))
    right = sum(accuracy * n for accuracy, n in zip(accuracies, samples))
    return {
        "accuracy_weighted": right / sum(samples),
        "accuracy": statistics.mean(accuracies),
        "accuracy_std": statistics.pstdev(accuracies),
    }


def results_of(name: str) -> Results:
    """Return the committed runs of a folder."""
    return Results(finished_rows(HERE / name / "results.csv"), read(HERE / name / "clients.csv"))


def figures(name: str) -> dict[tuple[str, str], Comparison]:
    """Return what can be compared of the committed runs of a folder."""
    return comparisons(results_of(name), read(HERE / name / "paper.csv"), BANDS[name])


def comparisons(
    results: Results, paper: Iterable[Row], bands: Mapping[str, float]
) -> dict[tuple[str, str], Comparison]:
    """Return, by condition and row, what can be compared; without a band nothing can."""
    found = {}
    for row in paper:
        band = bands.get(row["condition"].split("_")[0])
        ours = results.values(row["condition"], row["row"], "accuracy_weighted")
        if ours and band is not None:
            one = Comparison(float(row["mean"]), None, ours, band)
            found[row["condition"], row["row"]] = one
    return found


def table(
    results: Results,
    paper: Iterable[Row],
    compared: Mapping[tuple[str, str], Comparison],
    condition: str,
) -> str:
    """Return the table of a condition; where figures cannot be compared, the order of rows is.

    There is none before the runs of its first row are done.
    """
    theirs = {row["row"]: row for row in paper if row["condition"] == condition}
    rows, kept, shown = [], [], []
    for name in ORDER:
        ours = results.values(condition, name, "accuracy_weighted")
        if not ours:
            continue
        cells = [NAMES.get(name, name.replace("lambda=", "λ = "))]
        if (condition, name) in compared:
            kept.append(compared[condition, name])
            cells += kept[-1].cells(3)
        else:
            said = f"{float(theirs[name]['mean']):.3f}" if name in theirs else "–"
            cells += [said, measured(ours, 3), ""]
            if name in theirs and name not in NAMES:  # those are some of the other rows
                shown.append((float(theirs[name]["mean"]), statistics.mean(ours)))
        unweighted = measured(results.values(condition, name, "accuracy"), 3)
        std = measured(results.values(condition, name, "accuracy_std"), 3)
        cells += [unweighted, f"{float(theirs[name]['std']):.2f}" if name in theirs else "–", std]
        rows.append(cells)
    if not rows:
        return ""
    head = ["", "the paper", "ours", "difference", "ours, mean over devices"]
    head += ["std over devices, the paper", "ours"]
    said = ""
    if kept:
        agree = sum(one.agrees for one in kept)
        said = f": {agree} of {len(kept)} agree (within {kept[0].band})"
    elif len(shown) > 2:
        order = spearmanr(shown).statistic
        said = f": rank correlation with the paper {order:.2f} ({len(shown)} rows)"
    return f"## {condition}{said}\n\n" + markdown(head, rows)


def write(name: str) -> None:
    """Write the table of a folder."""
    folder = HERE / name
    results = results_of(name)
    paper = read(HERE / PAPER.get(name, name) / "paper.csv")
    hours = sum(float(row["seconds"]) for row in results.rows) / 3600
    text = (folder / "head.md").read_text()
    seeds = {"seeds": ", ".join(results.seeds), "seeds_n": len(results.seeds)}
    text = text.format(runs=len(results.rows), hours=hours, **seeds)
    compared = comparisons(results, paper, BANDS[name])
    tables = (table(results, paper, compared, condition) for condition in results.conditions)
    parts = [each for each in tables if each]
    (folder / "table.md").write_text(text + "\n" + "\n".join(parts) + notes(folder))
    print(f"{folder / 'table.md'}: {len(results.rows)} runs")


if __name__ == "__main__":
    write(sys.argv[1])
