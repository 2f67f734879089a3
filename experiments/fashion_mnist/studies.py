"""All algorithms on Fashion-MNIST as a study, and its tables and pictures."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.experiment import CellRun, Experiment, Row, group_rows, read_csv, read_study
from experiments.papers import COLOURS, fold, format_mean_and_std, markdown

HERE = Path(__file__).parent
METRICS = ("accuracy", "accuracy_std", "accuracy_worst10", "class_std_mean")
MODELS = ("global", "personal", "hybrid")
CLEAN, POISONED, CLEAN_80 = "clean", "20 % poisoned", "clean, the same 80 clients"
HEADS = {CLEAN_80: "clean", POISONED: "20 % poisoned"}  # of the short table, and of the pictures
HEAD = ["", "accuracy", "spread (std)", "worst 10 %", "spread within clients", "seconds"]
HERO = (
    *("FedAvg", "SCAFFOLD", "q-FFL", "TERM", "Per-FedAvg"),
    *("L2SGD", "FLAME", "Ditto", "FedRep", "local"),
)
PANELS = {"accuracy": "Mean accuracy over clients", "accuracy_worst10": "Worst 10 % of clients"}
MODEL_COLOURS = {"global": COLOURS[5], "personal": COLOURS[4]}
LEGEND_LABELS = {"global": "one global model", "personal": "personal models"}


class Results:
    """Results of the runs, by algorithm and setting.

    Args:
        rows: The rows of results.csv.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._groups = dict(group_rows(rows, "algorithm", "setting"))
        self.algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))

    def values(self, algorithm: str, setting: str, column: str) -> list[float]:
        """Return a column's values of an algorithm in a setting, one per seed."""
        rows = self._groups.get((algorithm, setting), [])
        return [float(row[column]) for row in rows if row.get(column)]

    def main_model(self, algorithm: str) -> str:
        """Return the model to show: the personal one, or the global one without a personal one."""
        has_own = any(self.values(algorithm, s, "test/personal/accuracy") for s in HEADS)
        return "personal" if has_own else "global"


def read_results() -> Results:
    """Return the committed results."""
    return Results(read_csv(HERE / "results.csv"))


def tabulate(results: Results) -> str:
    """Return a table of means over seeds for each setting."""
    parts = []
    for setting in (CLEAN, POISONED, CLEAN_80):
        lines = []
        for algorithm in results.algorithms:
            seconds = results.values(algorithm, setting, "seconds/total")
            for model in MODELS:
                columns = [
                    results.values(algorithm, setting, f"test/{model}/{metric}")
                    for metric in METRICS
                ]
                if columns[0]:
                    cells = [format_mean_and_std(values, 3) for values in columns]
                    name = f"{algorithm}, {model}"
                    lines.append([name, *cells, f"{statistics.median(seconds):.0f}"])
        parts.append(f"## {setting.capitalize()}\n\n" + fold("All models", markdown(HEAD, lines)))
    return "\n".join(parts)


def tabulate_main_models(results: Results) -> str:
    """Return the table of all settings for one model: the personal model if there is one."""
    lines = []
    for algorithm in results.algorithms:
        model = results.main_model(algorithm)
        cells = [
            format_mean_and_std(results.values(algorithm, setting, f"test/{model}/{metric}"), 3)
            for setting in HEADS
            for metric in METRICS[:3]
        ]
        lines.append([algorithm, model, *cells])
    head = [h for name in HEADS.values() for h in (f"{name}: accuracy", *HEAD[2:4])]
    return markdown(["algorithm", "model", *head], lines)


def draw_panel(axes: Axes, results: Results, algorithms: Sequence[str], metric: str) -> None:
    """Draw a line per algorithm: a filled circle without, an open circle with poisoned clients."""
    for place, algorithm in enumerate(algorithms):
        model = results.main_model(algorithm)
        column, colour = f"test/{model}/{metric}", MODEL_COLOURS[model]
        values = [statistics.mean(results.values(algorithm, s, column)) for s in HEADS]
        axes.plot(values, [place] * len(values), color=colour, lw=1.8, zorder=2)
        for value, fill in zip(values, (colour, "white")):
            axes.scatter(value, place, s=46, facecolor=fill, edgecolor=colour, lw=1.6, zorder=3)
    axes.set_title(PANELS[metric], loc="left", fontsize=11, fontweight="bold")
    axes.set_ylim(len(algorithms) - 0.4, -0.6)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def draw(results: Results, algorithms: Sequence[str], path: Path) -> None:
    """Draw accuracy and the worst 10 % of clients for some algorithms, from top to bottom."""
    figure = Figure(figsize=(10.4, 1.3 + 0.27 * len(algorithms)), layout="constrained")
    panels = figure.subplots(1, len(PANELS), sharex=True, sharey=True)
    for axes, metric in zip(panels, PANELS):
        draw_panel(axes, results, algorithms, metric)
    panels[0].set_yticks(range(len(algorithms)), algorithms)
    circle = {"marker": "o", "ls": "", "markersize": 7, "markeredgewidth": 1.6}
    handles = [
        Line2D([], [], color=MODEL_COLOURS[m], label=LEGEND_LABELS[m], **circle)
        for m in LEGEND_LABELS
    ]
    handles += [
        Line2D([], [], color="0.35", label="no attack", **circle),
        Line2D([], [], color="0.35", mfc="white", label="20 % of clients poisoned", **circle),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)


def make_page() -> str:
    """Return the text of table.md."""
    return f"{(HERE / 'head.md').read_text()}\n{tabulate(read_results())}"


def write_pages() -> None:
    """Write table.md and the pictures."""
    results = read_results()
    (HERE / "table.md").write_text(make_page())
    draw(results, results.algorithms, HERE / "algorithms.png")
    draw(results, HERO, HERE / "hero.png")


def collect(run: CellRun) -> dict[str, list[Row]]:
    """Return the row of a run."""
    columns = [f"test/{model}/{metric}" for model in MODELS for metric in METRICS]
    return {"results.csv": [run.select(*columns)]}


def make_experiment(**options: Any) -> Experiment:
    """Return all algorithms on Fashion-MNIST."""
    content = read_study(HERE / "study.yaml")
    return Experiment("fashion_mnist", content, collect, write_pages, options)


EXPERIMENTS = {"fashion_mnist": make_experiment}
