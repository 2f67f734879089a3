"""Accuracy of global models over rounds, for Ditto's Fashion-MNIST runs that miss the paper's.

PL_FED_DATA=../data python -m experiments.ditto.over_rounds
"""

import argparse
import statistics
from pathlib import Path

from matplotlib.figure import Figure

from experiments.ditto.run import HERE, config
from experiments.grid import (
    FitResult,
    Job,
    Row,
    Rows,
    finished_rows,
    group_rows,
    merge_configs,
    read,
    shorten,
    work,
)
from experiments.tables import COLOURS

FOLDER = HERE / "fashion_over_rounds"
EVERY = 50  # rounds
LAST = 1_000  # rounds of the mean at the end of a line
RUNS = [  # runs that do not agree with the paper after the last round
    ("A1_50", "FedAvg"),
    ("A3_20", "FedAvg"),
    ("A1_50", "clipping"),
    ("A2_50", "multi-Krum"),
    ("A1_50", "fair"),
    ("A2_50", "fair"),
]
METHODS = list(dict.fromkeys(method for _, method in RUNS))


def rows_of(fitted: FitResult) -> Rows:
    """Return the accuracy in each validation, and the test accuracy after the last round."""
    column = "val/global/accuracy_weighted"
    rows = [
        {"round": row["round"], "accuracy_weighted": shorten(row[column])}
        for row in fitted.rounds
        if row.get(column)
    ]
    tested = shorten(fitted.last["test/global/accuracy_weighted"])
    return {"over_rounds.csv": rows, "results.csv": [{"global_accuracy_weighted": tested}]}


def draw(rows: list[Row], paper: dict[tuple[str, str], float], path: Path) -> None:
    """Draw accuracy over rounds, and the paper's figure at the end of each line."""
    conditions = list(group_rows(rows, "condition"))
    figure = Figure(figsize=(1 + 3.2 * len(conditions), 3.6), layout="constrained")
    panels = figure.subplots(1, len(conditions), sharey=True, squeeze=False)[0]
    colours = dict(zip(METHODS, COLOURS))
    for axes, ((condition,), condition_rows) in zip(panels, conditions):
        for (method,), own in group_rows(condition_rows, "method"):
            rounds = [int(row["round"]) for row in own]
            accuracy = [float(row["accuracy_weighted"]) for row in own]
            axes.plot(rounds, accuracy, color=colours[method], linewidth=1, label=method)
            end = paper[condition, "global" if method == "FedAvg" else method]
            last = statistics.mean(accuracy[-LAST // EVERY :])
            marker = {"color": colours[method], "markersize": 6}
            axes.plot(rounds[-1] * 1.03, last, "o", markerfacecolor="white", **marker)
            axes.plot(rounds[-1] * 1.08, end, "<", **marker)
        axes.plot([], [], "o", color="grey", mfc="white", label=f"our mean of {LAST:,} rounds")
        axes.plot([], [], "<", color="grey", label="the paper, last round")
        axes.set(xlabel="round", ylim=(0.3, 0.95), title=condition.replace("_", ", ") + " %")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right", fontsize=8)
    panels[0].set(ylabel="accuracy on benign devices' validation data")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run the missing runs, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument(
        "--conditions", nargs="+", choices=sorted({condition for condition, _ in RUNS})
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    validated = {"trainer": {"check_val_every_n_epoch": EVERY}}
    jobs = [
        Job(
            (condition, method, "0"),
            merge_configs(config("fashion", condition, method, 0), validated),
        )
        for condition, method in RUNS
        if condition in (options.conditions or [condition])
        and method in (options.methods or [method])
    ]
    names = ("condition", "method", "seed")
    work(jobs, FOLDER / "results.csv", names, rows_of, options.workers)
    done = {(row["condition"], row["method"]) for row in finished_rows(FOLDER / "results.csv")}
    rows = read(FOLDER / "over_rounds.csv")
    rows = [row for row in rows if (row["condition"], row["method"]) in done]
    rows.sort(key=lambda row: (row["condition"], RUNS.index((row["condition"], row["method"]))))
    paper = {
        (row["condition"], row["row"]): float(row["mean"])
        for row in read(HERE / "fashion" / "paper.csv")
    }
    if rows:
        draw(rows, paper, FOLDER / "over_rounds.png")


if __name__ == "__main__":
    main()
