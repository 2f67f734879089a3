"""FedTilt's Tables II, III and VII and a picture of the tilts, from the runs' rows.

python -m experiments.fedtilt.report
"""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.grid import Row, read
from experiments.tables import Comparison, markdown

HERE = Path(__file__).parent
BAND = 2.0  # points, for all four figures
METRICS = {
    "accuracy": "accuracy, %",
    "accuracy_std": "σ over clients",
    "class_std_mean": "μ_σ over classes",
    "class_std_std": "σ_σ over classes",
}
READINGS = {  # rows of the table: the paper's method, ours, and which of our models
    "FedAvg, global w": ("FedAvg", "FedAvg", "global"),
    "FedAvg, w_n after 10 local passes": ("FedAvg", "FedAvg", "personal"),
    "Ditto": ("Ditto", "Ditto", "personal"),
    "FedTilt": ("FedTilt", "FedTilt", "personal"),
}
TITLES = {"clean": "Table II: clean", "corruption": "Table III: random corruptions"}
TITLES["gaussian"] = "Table VII: Gaussian noise"


class Results:
    """Values over seeds."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)

    def values(self, setting: str, method: str, column: str, split: str) -> list[float]:
        """Return a column's values in points, one for each seed."""
        asked = (setting, method, split)
        return [
            100 * float(row[column])
            for row in self.rows
            if (row["setting"], row["method"], row["split"]) == asked and row.get(column)
        ]


def table(results: Results, paper: Sequence[Row], condition: str, split: str) -> str:
    """Return a table of a condition."""
    rows = []
    for setting in dict.fromkeys(row["setting"] for row in paper):
        if not setting.endswith(condition):
            continue
        theirs = {row["method"]: row for row in paper if row["setting"] == setting}
        for name, (method, ours, model) in READINGS.items():
            cells = [f"{setting.split('/')[0]}, {name}"]
            for metric in METRICS:
                values = results.values(setting, ours, f"{model}_{metric}", split)
                if values:
                    compared = Comparison(float(theirs[method][metric]), None, values, BAND)
                    cells += compared.cells(2)
            if len(cells) > 1:
                rows.append(cells)
    head = [""] + [cell for metric in METRICS.values() for cell in (metric, "ours", "difference")]
    return f"## {TITLES[condition]}\n\n" + markdown(head, rows) if rows else ""


def orders(results: Results, paper: Sequence[Row], split: str) -> str:
    """Return who is best in what, in the paper and here."""
    rows = []
    for setting in dict.fromkeys(row["setting"] for row in paper):
        theirs = {row["method"]: row for row in paper if row["setting"] == setting}
        for metric, title in METRICS.items():
            sign = -1 if metric == "accuracy" else 1
            found = {
                method: results.values(setting, method, f"personal_{metric}", split)
                for method in theirs
            }
            if not all(found.values()):
                continue
            ours = sorted(found, key=lambda m: sign * statistics.mean(found[m]))
            order = sorted(theirs, key=lambda m: sign * float(theirs[m][metric]))
            same = "✓" if ours == order else ("first ✓" if ours[0] == order[0] else "✗")
            rows.append([setting, title, " > ".join(order), " > ".join(ours), same])
    return "## Who is best\n\nThe trained w_n stands for FedAvg.\n\n" + markdown(
        ["setting", "figure", "the paper", "ours", "same"], rows
    )


def write(folder: Path = HERE) -> None:
    """Write tables.md and the pictures."""
    results = Results(read(folder / "results.csv"))
    paper = read(HERE / "paper.csv")
    split = "whole classes"
    hours = sum(float(row["seconds"]) for row in results.rows) / 3600
    head = (
        (HERE / "head.md")
        .read_text()
        .format(
            runs=len(results.rows),
            seeds=", ".join(sorted({row["seed"] for row in results.rows}, key=int)),
            hours=hours,
            lam=0.1,
            chosen="",
            band=BAND,
        )
    )
    parts = [table(results, paper, condition, split) for condition in TITLES]
    (folder / "tables.md").write_text(
        head + "\n".join([*filter(None, parts), orders(results, paper, split)])
    )


if __name__ == "__main__":
    write()
