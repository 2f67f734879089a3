"""Picture of global models over rounds, for Ditto's Fashion-MNIST runs that miss the paper's."""

import statistics

from matplotlib.figure import Figure

from experiments.ditto.results import HERE
from experiments.experiment import group_rows, read_csv
from experiments.papers import COLOURS

FOLDER = HERE / "fashion_over_rounds"
EVERY = 50  # rounds
LAST = 1_000  # rounds of the mean at the end of a line
RUNS = [  # runs that do not agree with the paper after the last round
    ("A1_50", "FedAvg"),
    ("A3_20", "FedAvg"),
    ("A1_50", "clipping"),
    ("A2_50", "multi-Krum"),
    ("A1_50", "fair"),
]
METHODS = list(dict.fromkeys(method for _, method in RUNS))


def draw() -> None:
    """Draw accuracy over rounds, and the paper's figure at the end of each line."""
    paper = {
        (row["condition"], row["row"]): float(row["mean"])
        for row in read_csv(HERE / "fashion" / "paper.csv")
    }
    rows = read_csv(FOLDER / "over_rounds.csv")
    rows.sort(key=lambda row: (row["condition"], RUNS.index((row["condition"], row["method"]))))
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
    figure.savefig(FOLDER / "over_rounds.png", dpi=150)
