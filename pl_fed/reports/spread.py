"""How much clients get, against how evenly they get it."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pl_fed.reports.group import Final, Group, is_lower_better, measure_of, models_of
from pl_fed.reports.picture import (
    Picture,
    bars,
    look,
    name_groups,
    round_numbers,
    sheet,
    styled,
)

_AROUND = [  # where a number may stand, in units of its distance from the point
    *((1, 0), (-1, 0), (0, 1), (0, -1), (0.8, 0.8), (-0.8, 0.8), (0.8, -0.8), (-0.8, -0.8)),
    *((1.9, 0), (-1.9, 0), (0, 1.9), (0, -1.9), (1.5, 1.5), (-1.5, 1.5), (1.5, -1.5), (-1.5, -1.5)),
]
_REACH = 8.0  # points between a point and its number


class Point(NamedTuple):
    """A group's models: their mean over clients, and the spread over clients."""

    group: Group
    model: str
    mean: Final
    spread: Final


def against_spread(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield the picture of accuracy against its spread over clients: a point a group and model."""
    measure = measure_of(groups, "test")
    points = list(_points(groups, measure))
    if not points:
        return
    title = f"Test {measure} against its spread over clients"
    lower = is_lower_better((run for each in groups for run in each.runs), measure)
    better = "left" if lower else "right"
    caption = (
        f"Benign clients: mean, and standard deviation over them. Further down is fairer, further"
        f" {better} is better."
    )
    shown = {point.group.number for point in points}
    named = [each for each in groups if each.number in shown] if len(groups) > 1 else []
    if named:
        caption += " Numbers are those of the runs' table."
    if any(point.mean.std is not None for point in points):
        caption += " Bars are the range over runs."
    said = (f"{p.group.title}, {p.model} {p.mean.mean:.4g} ± {p.spread.mean:.4g}" for p in points)
    rows = [_row(point, measure) for point in points]
    alt = f"{title}. {'; '.join(said)}."
    yield Picture(f"{measure}_spread", title, caption, alt, rows, _drawn(points, measure, named))


def _points(groups: Sequence[Group], measure: str) -> Iterator[Point]:
    for model in models_of(groups, "test"):
        for group in groups:
            mean = group.final(f"test/{model}/{measure}")
            spread = group.final(f"test/{model}/{measure}_std")
            if variances := group.finals(f"test/{model}/{measure}_var"):
                spread = spread or Final.of([math.sqrt(value) for value in variances])
            if mean and spread and math.isfinite(mean.mean) and math.isfinite(spread.mean):
                yield Point(group, model, mean, spread)


@styled
def _drawn(points: Sequence[Point], measure: str, named: Sequence[Group]) -> Figure:
    figure, (axes,) = sheet(1, 3.6 if len(named) < 10 else 5.0, named)
    models = list(dict.fromkeys(point.model for point in points))
    for place, model in enumerate(models):
        own = [point for point in points if point.model == model]
        style = look(place)
        x, y = [p.mean.mean for p in own], [p.spread.mean for p in own]
        across, along = bars([p.mean for p in own]), bars([p.spread for p in own])
        axes.errorbar(
            x, y, along, across, fmt=style["marker"], color=style["color"], ms=5, alpha=0.85,
            elinewidth=0.7, label=f"{model} models",
        )  # fmt: skip
    axes.set(xlabel=f"mean test {measure}", ylabel=f"spread of {measure} (std)")
    axes.margins(0.08)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0)
    name_groups(figure, named)
    if named:
        _number(figure, axes, points, models)
    return figure


def _number(figure: Figure, axes: Axes, points: Sequence[Point], models: Sequence[str]) -> None:
    """Write each point's number beside it, where the least is in its way."""
    figure.draw_without_rendering()  # which says where points lie
    data = [(point.mean.mean, point.spread.mean) for point in points]
    scale = 72 / figure.dpi
    places = [tuple(scale * z for z in axes.transData.transform(each)) for each in data]
    for point, where, (dx, dy) in zip(points, data, label_places(places)):
        axes.annotate(
            str(point.group.number), where, (dx, dy), textcoords="offset points", fontsize=7,
            ha="center", va="center", color=look(models.index(point.model))["color"],
        )  # fmt: skip


def label_places(points: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return for each point where its number is to stand, so that few numbers overlap.

    Each takes the place around its point that is furthest from other points and from the numbers
    that have a place, as far as that matters; near places are tried first.

    Args:
        points: Positions, in points of 1/72 inch.

    Returns:
        The offset of each number from its point.

    Example:
        >>> label_places([(0, 0), (8, 0)])  # the first may not stand where the second is
        [(-8.0, 0.0), (8.0, 0.0)]
    """
    taken = [(float(x), float(y)) for x, y in points]
    offsets = []
    for x, y in list(taken):
        choices = [(_REACH * dx, _REACH * dy) for dx, dy in _AROUND]

        def room(offset: tuple[float, float], x: float = x, y: float = y) -> float:
            here = (x + offset[0], y + offset[1])
            return min((math.dist(here, each) for each in taken if each != (x, y)), default=99.0)

        dx, dy = max(choices, key=lambda offset: min(room(offset), 1.2 * _REACH))
        taken.append((x + dx, y + dy))
        offsets.append((dx, dy))
    return offsets


def _row(point: Point, measure: str) -> dict[str, Any]:
    return round_numbers(
        {
            "group": point.group.number,
            "label": point.group.label,
            "model": point.model,
            measure: point.mean.mean,
            "spread": point.spread.mean,
            "runs": len(point.group.tested),
        }
    )
