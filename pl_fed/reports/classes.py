"""Fairness between classes: how well each is recognised, and how unevenly over clients."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from pl_fed.reports.group import Group, models_of
from pl_fed.reports.picture import BLACK, BLUE, Picture, round_numbers, short, styled, tiles
from pl_fed.reports.run import Run


class Classes(NamedTuple):
    """Accuracy by class over the benign clients that have test samples of it."""

    names: NDArray[np.int64]
    mean: NDArray[np.float64]
    spread: NDArray[np.float64]
    clients: NDArray[np.int64]


def by_class(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield a picture for each model: its accuracy by class."""
    for model in models_of(groups, "test"):
        found = [(group, table) for group in groups if (table := classes_of(group, model))]
        if not found:
            continue
        title = f"Accuracy by class, {model} models"
        caption = (
            "Test accuracy of each class: mean over the benign clients that have samples of it, and"
            " the standard deviation over them. The line is the mean over classes."
        )
        if any(len(group.tested) > 1 for group, _ in found):
            caption += " Where runs are several, both are means over them."
        said = "; ".join(f"{group.title}: {_said(table)}" for group, table in found)
        yield Picture(
            f"classes_{model}",
            title,
            caption,
            f"{title}. {said}.",
            [row for group, table in found for row in _rows(group, table)],
            _drawn(found),
        )


def classes_of(group: Group, model: str) -> Classes | None:
    """Return a group's accuracy by class, averaged over its runs; ``None`` if it has none."""
    column = f"{model}_accuracy"
    found = [_of_run(run, column) for run in group.tested if column in run.classes]
    if not found:
        return None
    names = np.unique(np.concatenate([table.names for table in found]))
    rows = []
    for name in names:
        own = [
            (table.mean[place], table.spread[place], table.clients[place])
            for table in found
            for place in np.flatnonzero(table.names == name)
        ]
        rows.append(np.mean(own, axis=0))
    mean, spread, clients = np.array(rows).reshape(-1, 3).T
    return Classes(names, mean, spread, clients.round().astype(np.int64)) if len(names) else None


def _of_run(run: Run, column: str) -> Classes:
    kept = (run.classes["byzantine"] == 0) & np.isfinite(run.classes[column])
    classes, values = run.classes["class"][kept].astype(np.int64), run.classes[column][kept]
    names = np.unique(classes)
    own = [values[classes == name] for name in names]
    return Classes(
        names,
        np.array([each.mean() for each in own]),
        np.array([each.std() for each in own]),
        np.array([len(each) for each in own], dtype=np.int64),
    )


def _said(table: Classes) -> str:
    worst, best = int(table.mean.argmin()), int(table.mean.argmax())
    ends = ((worst, "lowest"), (best, "highest"))
    return ", ".join(
        f"{what} class {table.names[place]} with {table.mean[place]:.4g}" for place, what in ends
    )


@styled
def _drawn(found: Sequence[tuple[Group, Classes]]) -> Figure:
    figure, lines, columns, room = tiles(len(found))
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).ravel()
    figure.subplots_adjust(wspace=0.06, **room)
    for place, (axes, (group, table)) in enumerate(zip(panels, found)):
        low = np.minimum(table.spread, table.mean)
        high = np.minimum(table.spread, 1 - table.mean)
        axes.errorbar(
            table.names, table.mean, [low, high], fmt="o", color=BLUE, ms=4, elinewidth=1, capsize=2
        )
        axes.axhline(float(table.mean.mean()), color=BLACK, ls="--", lw=0.8)
        axes.set_ylim(-0.04, 1.04)
        axes.set_title(short(group.title, 52), loc="left", fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        axes.tick_params(labelbottom=place + columns >= len(found))
        if place + columns >= len(found):
            axes.set_xlabel("class")
        if place % columns == 0:
            axes.set_ylabel("accuracy")
    for axes in panels[len(found) :]:
        axes.remove()
    return figure


def _rows(group: Group, table: Classes) -> Iterator[dict[str, Any]]:
    for name, mean, spread, clients in zip(*(each.tolist() for each in table)):
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
