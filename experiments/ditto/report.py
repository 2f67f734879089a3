"""Ditto's Tables 1, 5, 7 and 9 from the runs' rows.

python -m experiments.ditto.report vehicle
"""

import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.ditto.run import lams_of
from experiments.grid import Row, read
from experiments.tables import Comparison, markdown, measured, spread

HERE = Path(__file__).parent
BANDS = {"clean": 0.015, "A1": 0.015, "A2": 0.05, "A3": 0.05}
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


def table(results: Results, paper: Sequence[Row], condition: str, band: float | None) -> str:
    """Return the table of a condition; without a band the paper's figures are only shown."""
    rows, agree, compared = [], 0, 0
    for name in ROWS:
        theirs = [r for r in paper if (r["condition"], r["row"]) == (condition, name)]
        ours = results.values(condition, name, "accuracy_weighted")
        if not ours:
            continue
        cells = [NAMES.get(name, name.replace("lambda=", "λ = "))]
        std = measured(results.values(condition, name, "accuracy_std"), 3)
        unweighted = measured(results.values(condition, name, "accuracy"), 3)
        if theirs and band is not None:
            one = Comparison(float(theirs[0]["mean"]), None, ours, band)
            cells += one.cells(3)
            agree, compared = agree + one.agrees, compared + 1
        elif theirs:
            cells += [spread(float(theirs[0]["mean"]), None, 3), measured(ours, 3), ""]
        else:
            cells += ["–", measured(ours, 3), ""]
        rows.append([*cells, unweighted, f"{float(theirs[0]['std']):.2f}" if theirs else "–", std])
    head = ["", "the paper", "ours", "difference", "ours, mean over devices"]
    head += ["std over devices, the paper", "ours"]
    said = f": {agree} of {compared} agree (within {band})" if compared else ""
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
    bands = {"fashion": BANDS, "vehicle": dict.fromkeys(BANDS, 0.05), "fashion_small": {}}[name]
    parts = [table(results, paper, c, bands.get(c.split("_")[0])) for c in results.conditions]
    notes = folder / "notes.md"
    parts += [notes.read_text()] if notes.exists() else []
    (folder / "table.md").write_text(text + "\n" + "\n".join(parts))
    mean = statistics.mean(float(row["seconds"]) for row in results.rows)
    print(f"{folder / 'table.md'}: {len(results.rows)} runs of {mean:.0f} s")


if __name__ == "__main__":
    write(sys.argv[1])
