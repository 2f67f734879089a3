"""Report of FLAME's Table III and its pictures, from the rows of the runs.

python -m experiments.flame.report
"""

import importlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from experiments.evidence import format_interval
from experiments.flame.rankings import tabulate_all_rankings
from experiments.flame.results import COLUMNS, GLOBAL, PERSONAL, Results, describe
from experiments.flame.run import METHODS
from experiments.grid import Row, finished_rows, group_rows, read
from experiments.tables import (
    COLOURS,
    MARKERS,
    Comparison,
    fold,
    markdown,
    notes,
    tabulate_misses,
)

HERE = Path(__file__).parent
SAME = "pFedMe, step 1"  # has FLAME's values, so pictures leave it out
MODELS = {"HM": "Hybrid models", "PM": "Personal models", "GM": "Global models"}
SHOWN_COLOURS = (0, 5, 4)  # of FLAME, pFedMe and Ditto in the picture of the table
HYBRID = "FLAME, hybrid model"
GLOBAL_BAND, STDS = 0.03, 2.0  # personal and hybrid models: twice the paper's std over its runs


def figures() -> dict[str, dict[str, Comparison]]:
    """Return the comparisons of the committed runs."""
    return comparisons(Results(finished_rows(HERE / "results.csv")), read(HERE / "paper.csv"))


def comparisons(results: Results, paper: Iterable[Row]) -> dict[str, dict[str, Comparison]]:
    """Return the comparisons with the paper by setting, then by the paper's column."""
    found: dict[str, dict[str, Comparison]] = {}
    for row in paper:
        ours = results.values(row["setting"], *COLUMNS[row["column"]])
        mean, std = float(row["mean"]), float(row["std"])
        band = GLOBAL_BAND if row["column"].endswith("GM") else STDS * std
        if ours:
            compared = Comparison(mean, std, ours, band)
            found.setdefault(row["setting"], {})[row["column"]] = compared
    return found


def tables(results: Results, compared: Mapping[str, Mapping[str, Comparison]]) -> str:
    """Return all tables."""
    parts = []
    for title in ("FLAME", "pFedMe", "Ditto"):
        names = [name for name in COLUMNS if name.startswith(title)]
        head = ["setting"]
        for name in names:
            head += [f"{name}, paper", "ours", "difference"]
        complete = {s: columns for s, columns in compared.items() if columns.keys() >= {*names}}
        if not complete:
            continue
        verdicts = [columns[name].agrees for columns in complete.values() for name in names]
        rows = [
            [describe(setting), *(cell for name in names for cell in columns[name].cells())]
            for setting, columns in complete.items()
        ]
        title += ", as coded" if title == "Ditto" else ""
        count = f"{sum(verdicts)} of {len(verdicts)} figures agree"
        parts.append(f"## {title}: {count}\n\n" + fold("All figures", markdown(head, rows)))
    parts.append("## Our means with 95 % intervals over seeds\n")
    for title, names in (("Personal and hybrid models", PERSONAL), ("Global models", GLOBAL)):
        rows = [
            [describe(s), *(format_interval(results.values(s, *name)) for name in names.values())]
            for s in compared
        ]
        parts.append(fold(title, markdown(["setting", *names], rows)))
    return "\n".join(parts)


def draw_table(compared: Mapping[str, Mapping[str, Comparison]], path: Path) -> None:
    """Draw the paper's figures with their bands, and ours."""
    settings = list(compared)
    figure = Figure(figsize=(13, 0.36 * len(settings) + 1.8), layout="constrained")
    panels = figure.subplots(1, len(MODELS), sharey=True)
    for axes, (model, words) in zip(panels, MODELS.items()):
        names = [name for name in COLUMNS if name.endswith(model)]
        agrees = [
            compared[s][name].agrees for s in settings for name in names if name in compared[s]
        ]
        for number, name in enumerate(names):
            for place, setting in enumerate(settings):
                if name in compared[setting]:
                    draw_comparison(axes, compared[setting][name], place, number)
        axes.set_title(f"{words}: {sum(agrees)} of {len(agrees)} in the band", fontsize=10.5)
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
    figure.savefig(path, dpi=130)


def draw_comparison(axes: Axes, comparison: Comparison, place: int, number: int) -> None:
    """Draw one figure: a bar for the paper's band, a tick for its figure, a marker for ours."""
    colour, y = COLOURS[SHOWN_COLOURS[number]], place + (number - 1) * 0.24
    band = [comparison.paper - comparison.band, comparison.paper + comparison.band]
    axes.plot(band, [y, y], color=colour, lw=5, alpha=0.25, solid_capstyle="butt")
    axes.plot(comparison.paper, y, "|", color=colour, ms=7)
    axes.plot(statistics.mean(comparison.ours), y, MARKERS[number], color=colour, ms=4)


def draw_curves(curves: Iterable[Row], settings: Sequence[str], path: Path) -> None:
    """Draw validation accuracies over rounds, as in the paper's Figure 3: means over seeds."""
    figure = Figure(figsize=(3.7 * len(settings) + 0.6, 6.4), layout="constrained")
    panels = figure.subplots(2, len(settings), squeeze=False, sharex=True, sharey="col")
    all_rows = list(curves)
    for column, setting in enumerate(settings):
        rows = [row for row in all_rows if row["setting"] == setting and row["method"] != SAME]
        for (method,), own in group_rows(rows, "method"):
            number = list(METHODS).index(method)
            for axes, model in zip(panels[:, column], ("personal", "global")):
                points = mean_over_rounds(own, f"{model}_accuracy")
                style = {"color": COLOURS[number], "marker": MARKERS[number], "ms": 3.5}
                axes.plot(*zip(*points), label=method, **style)
            if method == "FLAME":
                points = mean_over_rounds(own, "hybrid_accuracy")
                panels[0, column].plot(*zip(*points), ":", color=COLOURS[number], label=HYBRID)
        panels[0, column].set_title(describe(setting), fontsize=10.5)
        panels[1, column].set_xlabel("round")
    for axes, model in zip(panels[:, 0], ("personal", "global")):
        axes.set_ylabel(f"accuracy of {model} models")
    finish_panels(figure, panels, columns=5)
    figure.savefig(path, dpi=130)


def mean_over_rounds(rows: Iterable[Row], column: str) -> list[tuple[int, float]]:
    """Return pairs of a round and the mean of a column over seeds."""
    return [
        (int(number) + 1, statistics.mean(float(row[column]) for row in group))
        for (number,), group in group_rows(rows, "round")
    ]


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


def draw_fairness(clients: Iterable[Row], settings: Sequence[str], path: Path) -> None:
    """Draw accuracy against the variance of losses over clients, as in the paper's Figure 8.

    The upper panels use mean losses over a client's samples. The lower panels use sums over its
    minibatches of 100, as in the authors' code, so that clients with large test sets count more.
    """
    figure = Figure(figsize=(3.7 * len(settings) + 0.6, 6.8), layout="constrained")
    panels = figure.subplots(2, len(settings), squeeze=False, sharex="col", sharey="row")
    client_rows = list(clients)
    for column, setting in enumerate(settings):
        rows = [row for row in client_rows if row["setting"] == setting and row["method"] != SAME]
        for (method,), own in group_rows(rows, "method"):
            for model, marker in (("global", "o"), ("personal", "^")):
                accuracy, *variances = loss_variances(own, model)
                style = {"color": COLOURS[list(METHODS).index(method)], "ms": 8}
                for axes, variance in zip(panels[:, column], variances):
                    axes.plot(accuracy, variance, marker, label=f"{method}, {model}", **style)
        panels[0, column].set_title(describe(setting), fontsize=10.5)
        panels[1, column].set_xlabel("mean accuracy over clients")
    for axes, loss in zip(panels[:, 0], ("mean loss", "summed loss")):
        axes.set(yscale="log", ylabel=f"variance of clients' {loss}")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter("")
    finish_panels(figure, panels, columns=4)
    figure.savefig(path, dpi=130)


def loss_variances(rows: Iterable[Row], model: str) -> tuple[float, float, float]:
    """Return means over seeds: accuracy, variance of mean losses, variance of summed losses."""
    accuracies, means, sums = [], [], []
    for _, run in group_rows(rows, "seed"):
        accuracies.append(statistics.mean(float(row[f"{model}_accuracy"]) for row in run))
        losses = [float(row[f"{model}_loss"]) for row in run]
        batches = [-(-int(row["test_samples"]) // 100) for row in run]
        means.append(statistics.variance(losses))
        sums.append(statistics.variance(a * b for a, b in zip(losses, batches)))
    return statistics.mean(accuracies), statistics.mean(means), statistics.mean(sums)


def count_absent_clients() -> str:
    """Return the numbers of clients without a round in the curves over clients per round."""
    figures = importlib.import_module("experiments.flame.figures")  # imports this module
    counts = (int((draws == 0).sum()) for draws in figures.count_draws_of_curves())
    return ", ".join(map(str, counts))


def page(folder: Path = HERE) -> str:
    """Return the text of table3.md."""
    results = Results(finished_rows(folder / "results.csv"), read(folder / "clients.csv"))
    paper = read(HERE / "paper.csv")
    compared = comparisons(results, paper)
    seeds = sorted({row["seed"] for row in results.rows}, key=int)
    hours = sum(float(row["seconds"]) for row in results.rows) / 3600
    named = {
        f"{describe(setting)}: {name}": comparison
        for setting, columns in compared.items()
        for name, comparison in columns.items()
    }
    head = (HERE / "head.md").read_text().format(
        runs=len(results.rows), seeds=len(seeds), each=", ".join(seeds), hours=hours, lr=0.1,
        stds=STDS, band=GLOBAL_BAND, agree=sum(c.agrees for c in named.values()),
        compared=len(named), misses=tabulate_misses(named), absent=count_absent_clients(),
        rankings=tabulate_all_rankings(results, paper),
    )  # fmt: skip
    return head + tables(results, compared) + notes(HERE)


def write(folder: Path = HERE) -> None:
    """Write table3.md and the pictures."""
    (folder / "table3.md").write_text(page(folder))
    rows = finished_rows(folder / "results.csv")
    compared = comparisons(Results(rows), read(HERE / "paper.csv"))
    draw_table(compared, folder / "table3.png")
    hybrid = [s for s in compared if "hybrid" in s]
    draw_curves(read(folder / "curves.csv"), hybrid, folder / "curves.png")
    draw_fairness(read(folder / "clients.csv"), hybrid, folder / "fairness.png")


if __name__ == "__main__":
    write()
