"""The mean of a test metric over clients, against its spread over clients."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pl_fed.reports.group import Final, Group, is_lower_better, list_models, main_metric
from pl_fed.reports.picture import (
    GREY,
    MARKERS,
    Picture,
    apply_style,
    error_bars,
    line_style,
    make_panels,
    name_groups,
    round_numbers,
)

_OFFSETS = [  # candidate positions of a number around its point, in units of _REACH
    *((1, 0), (-1, 0), (0, 1), (0, -1), (0.8, 0.8), (-0.8, 0.8), (0.8, -0.8), (-0.8, -0.8)),
    *((1.9, 0), (-1.9, 0), (0, 1.9), (0, -1.9), (1.5, 1.5), (-1.5, 1.5), (1.5, -1.5), (-1.5, -1.5)),
]
_REACH = 8.0  # points between a point and its number


class Point(NamedTuple):
    """The result of a group's models.

    Attributes:
        group: The group.
        model: The name of the model.
        mean: The mean over clients.
        spread: The standard deviation over clients.
    """

    group: Group
    model: str
    mean: Final
    spread: Final


def draw_spread(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield the picture of the main metric against its spread over clients.

    It has a point for each group and model.
    """
    metric = main_metric(groups, "test")
    points = list(_points(groups, metric))
    if not points:
        return
    title = f"Test {metric} against its spread over clients"
    lower = is_lower_better((run for group in groups for run in group.runs), metric)
    better = "left" if lower else "right"
    caption = (
        "Mean and standard deviation over benign clients. Lower points are fairer; points further"
        f" {better} are better."
    )
    numbers = {point.group.number for point in points}
    named = [group for group in groups if group.number in numbers] if len(groups) > 1 else []
    if named:
        caption += " Numbers refer to the table of runs; a line joins the models of a group."
    if any(point.mean.std is not None for point in points):
        caption += " Bars are the range over runs."
    results = (
        f"{p.group.title}, {p.model} {p.mean.mean:.4g} ± {p.spread.mean:.4g}" for p in points
    )
    rows = [_row(point, metric) for point in points]
    alt = f"{title}. {'; '.join(results)}."
    yield Picture(f"{metric}_spread", title, caption, alt, rows, _draw(points, metric, named))


def _points(groups: Sequence[Group], metric: str) -> Iterator[Point]:
    for model in list_models(groups, "test"):
        for group in groups:
            mean = group.final(f"test/{model}/{metric}")
            spread = group.final(f"test/{model}/{metric}_std")
            if variances := group.finals(f"test/{model}/{metric}_var"):
                spread = spread or Final.summarize([math.sqrt(value) for value in variances])
            if mean and spread and math.isfinite(mean.mean) and math.isfinite(spread.mean):
                yield Point(group, model, mean, spread)


@apply_style
def _draw(points: Sequence[Point], metric: str, named: Sequence[Group]) -> Figure:
    figure, (axes,) = make_panels(1, 3.4 if len(named) < 10 else 4.6, named)
    models = list(dict.fromkeys(point.model for point in points))
    for number in dict.fromkeys(point.group.number for point in points):
        color = line_style(number - 1)["color"]
        own = [point for point in points if point.group.number == number]
        x, y = [point.mean.mean for point in own], [point.spread.mean for point in own]
        axes.plot(x, y, color=color, lw=0.8, alpha=0.6)
        for point in own:
            axes.errorbar(
                [point.mean.mean], [point.spread.mean], error_bars([point.spread]),
                error_bars([point.mean]), fmt=MARKERS[models.index(point.model) % len(MARKERS)],
                color=color, ms=6, elinewidth=0.7,
                markerfacecolor=color if point.model == models[0] else "none",
            )  # fmt: skip
    axes.set(xlabel=f"mean test {metric}", ylabel=f"spread of {metric} (std)")
    axes.margins(0.08)
    _name_models(axes, models)
    name_groups(figure, named, lines=True, markers=False)
    if named:
        _number_points(figure, axes, points)
    return figure


def _name_models(axes: Axes, models: Sequence[str]) -> None:
    """Write the names of the models above the axes: the first is filled, the others are hollow."""
    handles = [
        Line2D([], [], ls="none", marker=MARKERS[place % len(MARKERS)], ms=6, color=GREY,
               markerfacecolor="none" if place else GREY)
        for place in range(len(models))
    ]  # fmt: skip
    names = [f"{model} models" for model in models]
    axes.legend(handles, names, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0)


def _number_points(figure: Figure, axes: Axes, points: Sequence[Point]) -> None:
    """Write the number of each group beside its points, with little overlap."""
    figure.draw_without_rendering()  # fixes the positions of the points
    positions = [(point.mean.mean, point.spread.mean) for point in points]
    scale = 72 / figure.dpi
    places = [tuple(scale * z for z in axes.transData.transform(xy)) for xy in positions]
    for point, position, (dx, dy) in zip(points, positions, place_labels(places)):
        axes.annotate(
            str(point.group.number), position, (dx, dy), textcoords="offset points", fontsize=8,
            ha="center", va="center",
        )  # fmt: skip


def place_labels(points: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return an offset for the number of each point, so that few numbers overlap.

    A number takes the candidate position furthest from other points and from numbers already
    placed. Distances above 1.2 times ``_REACH`` count as equal; ties go to the nearest position.

    Args:
        points: Positions, in points of 1/72 inch.

    Returns:
        The offset of each number from its point, in points of 1/72 inch.

    Example:
        >>> place_labels([(0, 0), (8, 0)])  # the first number avoids the second point
        [(-8.0, 0.0), (8.0, 0.0)]
    """
    taken = [(float(x), float(y)) for x, y in points]
    offsets = []
    for x, y in list(taken):
        choices = [(_REACH * dx, _REACH * dy) for dx, dy in _OFFSETS]

        def clearance(offset: tuple[float, float], x: float = x, y: float = y) -> float:
            """Return the distance of a number from other points and numbers."""
            position = (x + offset[0], y + offset[1])
            occupied = (place for place in taken if place != (x, y))
            return min((math.dist(position, place) for place in occupied), default=99.0)

        dx, dy = max(choices, key=lambda offset: min(clearance(offset), 1.2 * _REACH))
        taken.append((x + dx, y + dy))
        offsets.append((dx, dy))
    return offsets


def _row(point: Point, metric: str) -> dict[str, Any]:
    return round_numbers(
        {
            "group": point.group.number,
            "label": point.group.label,
            "model": point.model,
            metric: point.mean.mean,
            "spread": point.spread.mean,
            "runs": len(point.group.tested_runs),
        }
    )
