"""Picture of accuracy and of the worst 10 % of clients, without and with poisoned clients."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.grid import Row
from experiments.tables import COLOURS

HERO = (
    *("FedAvg", "SCAFFOLD", "q-FFL", "TERM", "Per-FedAvg"),
    *("L2SGD", "FLAME", "Ditto", "FedRep", "local"),
)
PANELS = {"accuracy": "Mean accuracy over clients", "accuracy_worst10": "Worst 10 % of clients"}
MODEL_COLOURS = {"global": COLOURS[5], "personal": COLOURS[4]}
LEGEND_LABELS = {"global": "one global model", "personal": "personal models"}


def mean_of_rows(rows: Sequence[Row], algorithm: str, setting: str, column: str) -> float | None:
    """Return the mean over seeds of a column; ``None`` without a value."""
    values = [
        float(row[column])
        for row in rows
        if (row["algorithm"], row["setting"]) == (algorithm, setting) and row.get(column)
    ]
    return statistics.mean(values) if values else None


def main_model(rows: Sequence[Row], algorithm: str) -> str:
    """Return the model to show: the personal one, or the global one without personal models."""
    own = any(row["algorithm"] == algorithm and row.get("personal_accuracy") for row in rows)
    return "personal" if own else "global"


def draw_panel(
    axes: Axes, rows: Sequence[Row], algorithms: Sequence[str], settings: Sequence[str], metric: str
) -> None:
    """Draw a line per algorithm: a filled circle without, an open circle with poisoned clients."""
    for place, algorithm in enumerate(algorithms):
        model = main_model(rows, algorithm)
        columns = [
            mean_of_rows(rows, algorithm, setting, f"{model}_{metric}") for setting in settings
        ]
        values = [value for value in columns if value is not None]
        colour = MODEL_COLOURS[model]
        axes.plot(values, [place] * len(values), color=colour, lw=1.8, zorder=2)
        for value, fill in zip(values, (colour, "white")):
            axes.scatter(value, place, s=46, facecolor=fill, edgecolor=colour, lw=1.6, zorder=3)
    axes.set_title(PANELS[metric], loc="left", fontsize=11, fontweight="bold")
    axes.set_ylim(len(algorithms) - 0.4, -0.6)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def draw(
    rows: Sequence[Row], algorithms: Sequence[str], settings: Sequence[str], path: Path
) -> None:
    """Draw both panels for some algorithms, from top to bottom."""
    figure = Figure(figsize=(10.4, 1.3 + 0.27 * len(algorithms)), layout="constrained")
    panels = figure.subplots(1, len(PANELS), sharex=True, sharey=True)
    for axes, metric in zip(panels, PANELS):
        draw_panel(axes, rows, algorithms, settings, metric)
    panels[0].set_yticks(range(len(algorithms)), algorithms)
    circle = {"marker": "o", "ls": "", "markersize": 7, "markeredgewidth": 1.6}
    handles = [
        *(
            Line2D([], [], color=MODEL_COLOURS[m], label=LEGEND_LABELS[m], **circle)
            for m in LEGEND_LABELS
        ),
        Line2D([], [], color="0.35", label="no attack", **circle),
        Line2D([], [], color="0.35", mfc="white", label="20 % of clients poisoned", **circle),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)
