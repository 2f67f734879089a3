"""Pictures of FLAME's Table III, and of its Figures 4 to 12, from the committed results."""

import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from experiments.experiment import Row, group_rows, read_csv
from experiments.flame.page import Comparisons
from experiments.flame.results import COLUMNS, HERE, METHODS, describe
from experiments.papers import COLOURS, MARKERS, Comparison, count_agreements

SAME = "pFedMe, step 1"  # has FLAME's values, so pictures leave it out
MODELS = {"HM": "Hybrid models", "PM": "Personal models", "GM": "Global models"}
SHOWN_COLOURS = (0, 5, 4)  # of FLAME, pFedMe and Ditto in the picture of the table
HYBRID = "FLAME, hybrid model"
ATTACKS = ("label poisoning", "same value", "sign flipping", "Gaussian")
FIGURES = {"λ": "Fig. 9: λ", "H": "Fig. 10: H", "ρ": "Fig. 11: ρ", "s": "Fig. 12: s of 100"}
PAIR = ("personal", "global")
Points = Sequence[tuple[float, float]]


def draw_table(compared: Comparisons) -> None:
    """Draw the paper's figures with their bands, and ours."""
    settings = list(compared)
    figure = Figure(figsize=(13, 0.36 * len(settings) + 1.8), layout="constrained")
    panels = figure.subplots(1, len(MODELS), sharey=True)
    for axes, (model, words) in zip(panels, MODELS.items()):
        names = [name for name in COLUMNS if name.endswith(model)]
        drawn = [
            (compared[setting][name], place, number)
            for number, name in enumerate(names)
            for place, setting in enumerate(settings)
            if name in compared[setting]
        ]
        for comparison, place, number in drawn:
            draw_comparison(axes, comparison, place, number)
        counts = count_agreements(comparison for comparison, _, _ in drawn)
        axes.set_title(f"{words}: {counts} in the band", fontsize=10.5)
        axes.grid(axis="x", alpha=0.3)
        axes.set_xlabel("accuracy")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        for place in range(len(settings) - 1):
            axes.axhline(place + 0.5, color="0.92", lw=0.8, zorder=0)
    panels[0].set_yticks(range(len(settings)), [describe(setting) for setting in settings])
    panels[0].set_ylim(len(settings) - 0.5, -0.5)
    handles = [
        Line2D([], [], color=COLOURS[colour], marker=MARKERS[number], ls="", label=method)
        for number, (colour, method) in enumerate(zip(SHOWN_COLOURS, ("FLAME", "pFedMe", "Ditto")))
    ]
    handles.append(Line2D([], [], color="0.75", lw=6, label="band around the paper's figure"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(HERE / "table3.png", dpi=130)


def draw_comparison(axes: Axes, comparison: Comparison, place: int, number: int) -> None:
    """Draw one figure: a bar for the paper's band, a tick for its figure, a marker for ours."""
    colour, y = COLOURS[SHOWN_COLOURS[number]], place + (number - 1) * 0.24
    band = [comparison.paper - comparison.band, comparison.paper + comparison.band]
    axes.plot(band, [y, y], color=colour, lw=5, alpha=0.25, solid_capstyle="butt")
    axes.plot(comparison.paper, y, "|", color=colour, ms=7)
    axes.plot(statistics.mean(comparison.ours), y, MARKERS[number], color=colour, ms=4)


def draw_methods(
    panels: np.ndarray,
    rows: Iterable[Row],
    points_of: Callable[[list[Row], str], Points],
    size: float,
) -> None:
    """Draw a line for each method: personal models above, global models below.

    Args:
        panels: The upper and the lower panel.
        rows: The rows of the panels.
        points_of: Returns the points of a method's rows for a model.
        size: The size of the markers.
    """
    for (method,), own in group_rows(rows, "method"):
        number = [*METHODS, "multi-Krum"].index(method)
        style = {"color": COLOURS[number], "marker": MARKERS[number], "ms": size}
        for axes, model in zip(panels, PAIR):
            if points := points_of(own, model):
                axes.plot(*zip(*points), label=method, **style)
        if method == "FLAME":
            points = points_of(own, "hybrid")
            panels[0].plot(*zip(*points), ":", color=COLOURS[number], label=HYBRID)


def draw_curves(settings: Sequence[str]) -> None:
    """Draw validation accuracies over rounds, as in the paper's Figure 3: means over seeds."""
    figure, panels = make_panels(3.7, 6.4, len(settings), "col")
    groups = dict(group_rows(read_csv(HERE / "curves.csv"), "data", "split"))
    for column, setting in enumerate(settings):
        rows = [row for row in groups[tuple(setting.split("/"))] if row["method"] != SAME]
        draw_methods(
            panels[:, column],
            rows,
            lambda own, model: mean_over_rounds(own, f"{model}_accuracy"),
            size=3.5,
        )
        panels[0, column].set_title(describe(setting), fontsize=10.5)
        panels[1, column].set_xlabel("round")
    label_rows(panels, "accuracy")
    finish_panels(figure, panels, columns=5)
    figure.savefig(HERE / "curves.png", dpi=130)


def draw_attacks() -> None:
    """Draw accuracy against the share of Byzantine clients: a column for each attack."""
    rows = read_csv(HERE / "attacks.csv")
    figure, panels = make_panels(3.1, 6.4, len(ATTACKS), True)
    for column, attack in enumerate(ATTACKS):
        own_rows = [row for row in rows if row["attack"] in (attack, "none")]
        draw_methods(panels[:, column], own_rows, mean_over_shares, size=4.5)
        panels[0, column].set_title(attack, fontsize=10.5)
        panels[1, column].set_xlabel("malicious clients, %")
    label_rows(panels, "accuracy")
    finish_panels(figure, panels, columns=6)
    figure.savefig(HERE / "attacks.png", dpi=130)


def draw_parameters() -> None:
    """Draw losses over rounds: personal models above, global models below."""
    rows = read_csv(HERE / "parameter_curves.csv")
    figure, panels = make_panels(3.1, 6.0, len(FIGURES), "row")
    for column, (letter, title) in enumerate(FIGURES.items()):
        own_rows = [row for row in rows if row["line"].startswith(letter)]
        for number, ((line,), own) in enumerate(group_rows(own_rows, "line")):
            for axes, model in zip(panels[:, column], PAIR):
                points = mean_over_rounds(own, f"{model}_loss")
                axes.plot(*zip(*points), color=COLOURS[(0, 5, 4)[number]], label=line)
        for axes in panels[:, column]:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
            axes.grid(alpha=0.3, which="both")
            axes.spines[["top", "right"]].set_visible(False)
        panels[0, column].set_title(title, fontsize=10.5)
        panels[0, column].legend(frameon=False, fontsize="small")
        panels[1, column].set_xlabel("round")
    label_rows(panels, "validation loss")
    figure.savefig(HERE / "parameters.png", dpi=130)


def draw_fairness(settings: Sequence[str]) -> None:
    """Draw accuracy against the variance of losses over clients, as in the paper's Figure 8.

    The upper panels use mean losses over a client's samples. The lower panels use sums over its
    minibatches of 100, as in the authors' code, so that clients with large test sets count more.
    """
    figure = Figure(figsize=(3.7 * len(settings) + 0.6, 6.8), layout="constrained")
    panels = figure.subplots(2, len(settings), squeeze=False, sharex="col", sharey="row")
    groups = dict(group_rows(read_csv(HERE / "clients.csv"), "data", "split"))
    for column, setting in enumerate(settings):
        rows = [row for row in groups[tuple(setting.split("/"))] if row["method"] != SAME]
        for (method,), own in group_rows(rows, "method"):
            for model, marker in (("global", "o"), ("personal", "^")):
                accuracy, *variances = compute_variances(own, model)
                style = {"color": COLOURS[METHODS.index(method)], "ms": 8}
                for axes, variance in zip(panels[:, column], variances):
                    axes.plot(accuracy, variance, marker, label=f"{method}, {model}", **style)
        panels[0, column].set_title(describe(setting), fontsize=10.5)
        panels[1, column].set_xlabel("mean accuracy over clients")
    for axes, loss in zip(panels[:, 0], ("mean loss", "summed loss")):
        axes.set(yscale="log", ylabel=f"variance of clients' {loss}")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter("")
    finish_panels(figure, panels, columns=4)
    figure.savefig(HERE / "fairness.png", dpi=130)


def mean_over_rounds(rows: Iterable[Row], column: str) -> Points:
    """Return pairs of a round and the mean of a column over seeds."""
    return [
        (int(number) + 1, statistics.mean(float(row[column]) for row in group))
        for (number,), group in group_rows(rows, "round")
    ]


def mean_over_shares(rows: Iterable[Row], model: str) -> Points:
    """Return pairs of a share of Byzantine clients in percent and a model's mean accuracy."""
    column = f"test/{model}/accuracy"
    return sorted(
        (100 * float(fraction), statistics.mean(float(row[column]) for row in group))
        for (fraction,), group in group_rows(rows, "fraction")
        if group[0].get(column)
    )


def compute_variances(rows: Iterable[Row], model: str) -> tuple[float, float, float]:
    """Return means over seeds: accuracy, variance of mean losses, variance of summed losses."""
    accuracies, means, sums = [], [], []
    for _, run in group_rows(rows, "seed"):
        accuracies.append(statistics.mean(float(row[f"{model}_accuracy"]) for row in run))
        losses = [float(row[f"{model}_loss"]) for row in run]
        batches = [-(-int(row["test_samples"]) // 100) for row in run]
        means.append(statistics.variance(losses))
        sums.append(statistics.variance(a * b for a, b in zip(losses, batches)))
    return statistics.mean(accuracies), statistics.mean(means), statistics.mean(sums)


def make_panels(
    width: float, height: float, columns: int, share: str | bool
) -> tuple[Figure, np.ndarray]:
    """Return a figure with two rows of panels.

    Args:
        width: The width of a panel in inches.
        height: The height of the figure.
        columns: The number of columns.
        share: The panels with a common vertical axis: ``col``, ``row``, or all of them.
    """
    figure = Figure(figsize=(width * columns + 0.6, height), layout="constrained")
    panels = figure.subplots(2, columns, squeeze=False, sharex=True, sharey=share)
    return figure, panels


def label_rows(panels: np.ndarray, quantity: str) -> None:
    """Name the vertical axes of both rows of panels."""
    for axes, model in zip(panels[:, 0], PAIR):
        axes.set_ylabel(f"{quantity} of {model} models")


def finish_panels(figure: Figure, panels: np.ndarray, columns: int) -> None:
    """Add grids, and one legend of all lines, in some columns below the panels."""
    lines = {}
    for axes in panels.flat:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        lines |= {label: line for label, line in zip(labels, handles) if label not in lines}
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=columns, frameon=False
    )
