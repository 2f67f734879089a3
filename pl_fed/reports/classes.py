"""Fairness between classes: the accuracy of each class, and its spread over clients."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from pl_fed.reports.group import Group, list_models
from pl_fed.reports.picture import (
    BLACK,
    Picture,
    apply_style,
    line_style,
    make_tiles,
    round_numbers,
    shorten,
)
from pl_fed.reports.run import Run


class Classes(NamedTuple):
    """Accuracy of each class over the benign clients with test samples of the class.

    Attributes:
        names: The classes, int64 [classes].
        mean: The mean over clients, [classes].
        spread: The standard deviation over clients, [classes].
        clients: The number of clients with samples of the class, int64 [classes].
    """

    names: NDArray[np.int64]
    mean: NDArray[np.float64]
    spread: NDArray[np.float64]
    clients: NDArray[np.int64]


def draw_class_accuracy(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield a picture of the accuracy by class for each model."""
    for model in list_models(groups, "test"):
        panels = [(group, table) for group in groups if (table := class_accuracy(group, model))]
        if not panels:
            continue
        title = f"Accuracy by class, {model} models"
        caption = (
            "Test accuracy of each class: mean and standard deviation over the benign clients with"
            " test samples of the class. The dashed line is the mean over classes."
        )
        if any(len(group.tested_runs) > 1 for group, _ in panels):
            caption += " With several runs, both values are means over runs."
        alt = "; ".join(f"{group.title}: {_describe(table)}" for group, table in panels)
        yield Picture(
            f"classes_{model}",
            title,
            caption,
            f"{title}. {alt}.",
            [row for group, table in panels for row in _rows(group, table)],
            _draw(panels),
        )


def class_accuracy(group: Group, model: str) -> Classes | None:
    """Return a model's accuracy by class, the mean over a group's seeds; ``None`` without any."""
    column = f"{model}_accuracy"
    runs = group.first_of_seeds(run for run in group.tested_runs if column in run.classes)
    tables = [_run_accuracy(run, column) for run in runs]
    if not tables:
        return None
    names = np.unique(np.concatenate([table.names for table in tables]))
    rows = []
    for name in names:
        values = [
            (table.mean[place], table.spread[place], table.clients[place])
            for table in tables
            for place in np.flatnonzero(table.names == name)
        ]
        rows.append(np.mean(values, axis=0))
    mean, spread, clients = np.array(rows).reshape(-1, 3).T
    return Classes(names, mean, spread, clients.round().astype(np.int64)) if len(names) else None


def _run_accuracy(run: Run, column: str) -> Classes:
    valid = (run.classes["byzantine"] == 0) & np.isfinite(run.classes[column])
    classes, accuracies = run.classes["class"][valid].astype(np.int64), run.classes[column][valid]
    names = np.unique(classes)
    columns = [accuracies[classes == name] for name in names]
    return Classes(
        names,
        np.array([values.mean() for values in columns]),
        np.array([values.std() for values in columns]),
        np.array([len(values) for values in columns], dtype=np.int64),
    )


def _describe(table: Classes) -> str:
    worst, best = int(table.mean.argmin()), int(table.mean.argmax())
    ends = ((worst, "lowest"), (best, "highest"))
    return ", ".join(
        f"{rank} class {table.names[place]} with {table.mean[place]:.4g}" for place, rank in ends
    )


@apply_style
def _draw(panels: Sequence[tuple[Group, Classes]]) -> Figure:
    figure, lines, columns, margins = make_tiles(len(panels))
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).ravel()
    figure.subplots_adjust(wspace=0.06, **margins)
    for place, (axes, (group, table)) in enumerate(zip(grid, panels)):
        low = np.minimum(table.spread, table.mean)
        high = np.minimum(table.spread, 1 - table.mean)
        axes.errorbar(
            table.names, table.mean, [low, high], fmt="o", ms=4, elinewidth=1, capsize=2,
            color=line_style(group.number - 1)["color"],
        )  # fmt: skip
        axes.axhline(float(table.mean.mean()), color=BLACK, ls="--", lw=0.8)
        axes.set_ylim(-0.04, 1.04)
        axes.set_title(shorten(group.title, 34), loc="left", fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        axes.tick_params(labelbottom=place + columns >= len(panels))
        if place + columns >= len(panels):
            axes.set_xlabel("class")
        if place % columns == 0:
            axes.set_ylabel("accuracy")
    for axes in grid[len(panels) :]:
        axes.remove()
    return figure


def _rows(group: Group, table: Classes) -> Iterator[dict[str, Any]]:
    for name, mean, spread, clients in zip(*(column.tolist() for column in table)):
        yield round_numbers(
            {
                "group": group.number,
                "label": group.label,
                "class": name,
                "accuracy": mean,
                "spread": spread,
                "clients": clients,
            }
        )
