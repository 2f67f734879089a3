"""Ditto's Tables 1, 5, 7 and 9 from the runs' rows.

python -m experiments.ditto.report vehicle
"""

import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from experiments.ditto.run import lams_of
from experiments.grid import Row, read
from experiments.tables import Comparison, markdown, measured, notes

HERE = Path(__file__).parent
BANDS: dict[str, dict[str, float]] = {
    "fashion": {"clean": 0.015, "A1": 0.015, "A2": 0.05, "A3": 0.05},
    "fashion_small": {},
    "vehicle": {"clean": 0.05, "A1": 0.05, "A2": 0.05, "A3": 0.05},
}
GLOBAL = ["fair", "median", "Krum", "multi-Krum", "clipping", "k-norm", "k-loss"]
ROWS = {  # of the paper: our method, and the model
    "global": ("Ditto", "global"),
    "local": ("local", "personal"),
    **{name: (name, "global") for name in GLOBAL},
    "FedMGDA+": ("FedMGDA+", "global"),
    "MOCHA": ("MOCHA", "personal"),
    "finetuning": ("finetuning", "personal"),
    "Ditto, lambda=0.1": ("Ditto", "0.1"),
    "Ditto, lambda=1": ("Ditto", "1.0"),
    "Ditto, lambda=2": ("Ditto", "2.0"),
    "best_lambda": ("Ditto", "best"),
    "dynamic_lambda": ("Ditto", "personal"),
}
NAMES = {
    "best_lambda": "Ditto, best λ by validation",
    "dynamic_lambda": "Ditto, each client's own λ",
}


class Results:
    """What was measured, by condition."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = [row for row in rows if not row["failed"]]
        self.conditions = list(dict.fromkeys(row["condition"] for row in self.rows))
        self.seeds = sorted({row["seed"] for row in self.rows}, key=int)

    def values(self, condition: str, row: str, column: str) -> list[float]:
        """Return a column's values of one of the paper's rows, one for each seed."""
        method, model = ROWS[row]
        found = []
        for seed in self.seeds:
            runs = [r for r in self.rows if (r["condition"], r["seed"]) == (condition, seed)]
            runs = [r for r in runs if r["method"].split(",")[0] == method]
            if not runs:
                continue
            run = max(runs, key=lambda r: float(r.get("global_validation") or 0))
            found.append(float(run[f"{self._model(run, model)}_{column}"]))
        return found

    def _model(self, run: Row, model: str) -> str:
        """Return the name of a model in a run's columns."""
        lams = lams_of(run["condition"])
        if model == "best":
            among = [f"personal_{i}" for i in range(len(lams))]
            return max(among, key=lambda name: float(run[f"{name}_validation"]))
        return model if model.isalpha() else f"personal_{lams.index(float(model))}"


def figures(name: str) -> dict[tuple[str, str], Comparison]:
    """Return what can be compared of the committed runs of a folder."""
    results = Results(read(HERE / name / "results.csv"))
    return comparisons(results, read(HERE / name / "paper.csv"), BANDS[name])


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
    """Return the table of a condition; what cannot be compared is only shown."""
    theirs = {row["row"]: row for row in paper if row["condition"] == condition}
    rows, kept = [], []
    for name in ROWS:
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
        unweighted = measured(results.values(condition, name, "accuracy"), 3)
        std = measured(results.values(condition, name, "accuracy_std"), 3)
        cells += [unweighted, f"{float(theirs[name]['std']):.2f}" if name in theirs else "–", std]
        rows.append(cells)
    head = ["", "the paper", "ours", "difference", "ours, mean over devices"]
    head += ["std over devices, the paper", "ours"]
    agree = sum(one.agrees for one in kept)
    said = f": {agree} of {len(kept)} agree (within {kept[0].band})" if kept else ""
    return f"## {condition}{said}\n\n" + markdown(head, rows)


def write(name: str) -> None:
    """Write the table of a folder."""
    folder = HERE / name
    results = Results(read(folder / "results.csv"))
    source = folder if (folder / "paper.csv").exists() else HERE / "fashion"
    paper = read(source / "paper.csv")
    hours = sum(float(row["seconds"]) for row in results.rows) / 3600
    text = (folder / "head.md").read_text()
    seeds = {"seeds": ", ".join(results.seeds), "seeds_n": len(results.seeds)}
    text = text.format(runs=len(results.rows), hours=hours, **seeds)
    compared = comparisons(results, paper, BANDS[name])
    parts = [table(results, paper, compared, condition) for condition in results.conditions]
    (folder / "table.md").write_text(text + "\n" + "\n".join(parts) + notes(folder))
    mean = statistics.mean(float(row["seconds"]) for row in results.rows)
    print(f"{folder / 'table.md'}: {len(results.rows)} runs of {mean:.0f} s")


if __name__ == "__main__":
    write(sys.argv[1])
