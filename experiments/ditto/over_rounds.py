"""How accurate FedAvg is over the rounds of Ditto's Fashion-MNIST: does it wear off under attack?

PL_FED_DATA=../data python -m experiments.ditto.over_rounds
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from experiments.ditto.run import CONDITIONS, HERE, config
from experiments.grid import Fitted, Job, Row, Rows, finished, grouped, merged, read, shorter, work
from experiments.tables import COLOURS

FOLDER = HERE / "fashion_over_rounds"
EVERY = 50  # rounds


def rows_of(fitted: Fitted) -> Rows:
    """Return the accuracy in each validation, and on the test data in the end."""
    column = "val/global/accuracy_weighted"
    rows = [
        {"round": row["round"], "accuracy_weighted": shorter(row[column])}
        for row in fitted.rounds
        if row.get(column)
    ]
    tested = shorter(fitted.last["test/global/accuracy_weighted"])
    return {"over_rounds.csv": rows, "results.csv": [{"global_accuracy_weighted": tested}]}


def draw(rows: list[Row], paper: dict[str, float], path: Path) -> None:
    """Draw accuracy over rounds, and the paper's figure at the end of each line."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for colour, ((condition,), own) in zip(COLOURS, grouped(rows, "condition")):
        rounds = [int(row["round"]) for row in own]
        axes.plot(
            rounds,
            [float(row["accuracy_weighted"]) for row in own],
            color=colour,
            linewidth=1,
            label=condition.replace("_", ", ") + (" %" if "_" in condition else ""),
        )
        axes.plot(rounds[-1] * 1.015, paper[condition], "<", color=colour, markersize=6)
    axes.plot([], [], "<", color="grey", label="the paper")
    axes.set(xlabel="round", ylabel="accuracy on benign devices' validation data", ylim=(0.4, 0.95))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower left", ncols=3, fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run what is missing, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS["fashion"])
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    jobs = [
        Job(
            (condition, "0"),
            merged(
                config("fashion", condition, "FedAvg", 0),
                {"trainer": {"check_val_every_n_epoch": EVERY}},
            ),
        )
        for condition in asked.conditions or CONDITIONS["fashion"]
    ]
    work(jobs, FOLDER / "results.csv", ("condition", "seed"), rows_of, asked.workers)
    done = {row["condition"] for row in finished(FOLDER / "results.csv")}
    rows = [row for row in read(FOLDER / "over_rounds.csv") if row["condition"] in done]
    paper = {
        row["condition"]: float(row["mean"])
        for row in read(HERE / "fashion" / "paper.csv")
        if row["row"] == "global"
    }
    if rows:
        draw(rows, paper, FOLDER / "over_rounds.png")


if __name__ == "__main__":
    main()
