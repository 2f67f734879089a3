"""Fronts: the mean against the worst 10 % of clients, a panel for each condition."""

import html
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from pl_fed.reports.picture import (
    BLACK,
    BLUE,
    COLOURS,
    GREY,
    LINES,
    MARKERS,
    WIDTH,
    Picture,
    apply_style,
    line_style,
    round_numbers,
    shorten,
)
from pl_fed.studies.comparison import MetricComparison
from pl_fed.studies.tables import SEEDS_RULE, describe_metric, name_files

Points = Mapping[str, Mapping[str, tuple[float, float]]]
"""Mean and worst 10 % of each method by condition."""

_FACETS = 6  # in a row of a picture
_FACET = 1.75  # inches
_TITLE_LENGTH = 26  # letters in a line
_NAME_LENGTH = 34
_MOST_STYLES = len(COLOURS) * len(LINES)

# A panel of a page, in pixels of a 200 × 170 image
_SIZE = (200, 170)
_LEFT, _RIGHT, _TOP, _BOTTOM = 38, 194, 6, 142
_FAINT = ' opacity="0.6"'
_NAMELESS = {False: {"color": GREY, "marker": "o"}, True: {"color": BLUE, "marker": "o"}}
_SHAPES = {
    "o": "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "s": "M-3.5,-3.5h7v7h-7z",
    "^": "M0,-4.4L4.2,3.4H-4.2z",
    "D": "M0,-4.8L4.8,0L0,4.8L-4.8,0z",
    "v": "M0,4.4L4.2,-3.4H-4.2z",
    "P": "M-1.5,-4.4h3v2.9h2.9v3h-2.9v2.9h-3v-2.9h-2.9v-3h2.9z",
    "X": "M-4.2,-2.1l2.1,-2.1l2.1,2.1l2.1,-2.1l2.1,2.1l-2.1,2.1l2.1,2.1l-2.1,2.1l-2.1,-2.1l-2.1,"
    "2.1l-2.1,-2.1l2.1,-2.1z",
}


def list_points(
    means: MetricComparison, worst: MetricComparison
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the mean and the worst 10 % of each method by condition; none without both."""
    layout = means.layout
    return {
        condition: {
            method: (x, y)
            for method in layout.methods
            if (method, condition) in means.entries
            and (x := means.entries[method, condition].mean) is not None
            and (y := worst.entries[method, condition].mean) is not None
        }
        for condition in layout.conditions
    }


def find_front(points: Mapping[str, tuple[float, float]], is_higher: bool = True) -> list[str]:
    """Return the names of points that no other point beats in both numbers, by the first number.

    A point beats another one if it is better in one number, and not worse in the other.

    Example:
        >>> find_front({"a": (0.9, 0.5), "b": (0.8, 0.7), "c": (0.7, 0.6)})
        ['b', 'a']
    """
    sign = 1 if is_higher else -1
    table = {name: (sign * x, sign * y) for name, (x, y) in points.items()}
    front = [
        name
        for name, (x, y) in table.items()
        if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in table.values())
    ]
    return sorted(front, key=lambda name: points[name])


def draw_fronts(means: MetricComparison, worst: MetricComparison) -> Picture:
    """Return the picture of the mean against the worst 10 % of clients, a panel per condition.

    A line joins the methods that no other method beats in both (the Pareto front).

    Args:
        means: The comparison by the mean over clients.
        worst: The comparison by the mean of the worst tenth of the clients.
    """
    layout, metric = means.layout, describe_metric(means.metric)
    points = list_points(means, worst)
    fronts = _find_fronts(means, points)
    rows = [
        round_numbers(
            {
                "condition": condition,
                "method": method,
                "mean": x,
                "worst10": y,
                "on_front": int(method in fronts[condition]),
            }
        )
        for condition, members in points.items()
        for method, (x, y) in members.items()
    ]
    texts = "; ".join(f"{c}: {', '.join(front) or 'none'}" for c, front in fronts.items())
    return Picture(
        f"front_{name_files(means.metric)}",
        f"Mean against worst 10 % of clients by {metric}",
        describe_fronts(means),
        f"Methods that no other one beats in {metric} and its worst 10 %, by condition. {texts}.",
        rows,
        _draw_facets(layout.methods, points, fronts),
        describe_missing_points(means, points),
    )


def _find_fronts(means: MetricComparison, points: Points) -> dict[str, list[str]]:
    return {
        condition: find_front(members, means.is_higher_better)
        for condition, members in points.items()
    }


def describe_missing_points(means: MetricComparison, points: Points) -> str:
    """Return a sentence on the methods without a point; empty if all have theirs."""
    missing = len(means.entries) - sum(map(len, points.values()))
    if not missing:
        return ""
    is_one = missing == 1
    return (
        f"{missing} point{' is' if is_one else 's are'} missing: a run diverged, or none has a"
        " result."
    )


def describe_fronts(means: MetricComparison) -> str:
    """Return the caption of fronts."""
    return (
        "A point is a method: mean over all clients, and mean over the worst 10 % of clients, both"
        f" averaged over seeds. The {'upper right' if means.is_higher_better else 'lower left'} is"
        " best. The line joins methods that no other one beats in both. It is drawn through"
        f" estimates, so methods near it may belong to it. {SEEDS_RULE}"
    )


# Picture


@apply_style
def _draw_facets(
    methods: Sequence[str], points: Points, fronts: Mapping[str, Sequence[str]]
) -> Figure:
    """Draw a panel for each condition, at most six in a row, with equal scales."""
    columns = min(_FACETS, len(points))
    rows = -(-len(points) // columns)
    side = 3.4 if columns == 1 else _FACET
    width = max(WIDTH, side * columns)
    places = {method: place for place, method in enumerate(methods)}
    is_named = len(methods) <= _MOST_STYLES
    legend_columns = max(1, int(width / (0.5 + 0.07 * min(_NAME_LENGTH, max(map(len, methods))))))
    legend_height = 0.19 * -(-len(methods) // legend_columns) if is_named else 0.0
    figure = Figure(
        figsize=(width, side * 0.95 * rows + 0.45 + legend_height), layout="constrained"
    )
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).reshape(-1)
    for axes, (condition, members) in zip(panels, points.items()):
        axes.set_title(textwrap.fill(shorten(condition, 52), _TITLE_LENGTH), fontsize=8)
        front = [members[method] for method in fronts[condition]]
        axes.plot(*zip(*front), color=GREY, lw=1, zorder=1) if front else None
        for method, (x, y) in members.items():
            is_best = method in fronts[condition]
            style = line_style(places[method]) if is_named else {"color": GREY, "marker": "."}
            style = {**style, "ls": "none", "ms": 6 if is_best else 4.5}
            axes.plot([x], [y], alpha=1 if is_best else 0.65, zorder=2, **style)
        if not is_named:
            _name_front(axes, members, fronts[condition])
        axes.tick_params(labelsize=7)
        axes.locator_params(nbins=4)
    for axes in panels[len(points) :]:
        axes.set_visible(False)
    for axes in panels[max(0, len(points) - columns) : len(points)]:  # the last of each column
        axes.tick_params(labelbottom=True)
    figure.supxlabel("mean over clients", fontsize=9)
    figure.supylabel("worst 10 % of clients", fontsize=9)
    if is_named:
        handles = [
            Line2D([], [], ms=5, **{**line_style(place), "ls": "none"}) for place in places.values()
        ]
        figure.legend(
            handles,
            [shorten(method, _NAME_LENGTH) for method in methods],
            loc="outside upper center",
            ncols=min(legend_columns, len(methods)),
            handlelength=1,
            columnspacing=1.2,
        )
    return figure


def _name_front(
    axes: Axes, members: Mapping[str, tuple[float, float]], front: Sequence[str]
) -> None:
    """Write the names of the methods on the front beside their points."""
    for method in front:
        axes.annotate(
            shorten(method, 18),
            members[method],
            (-4, -2),
            textcoords="offset points",
            fontsize=6.5,
            ha="right",
            va="top",
        )
        axes.plot(*members[method], marker=MARKERS[0], color=COLOURS[0], ms=5, zorder=3)


# Panels of a page


def render_fronts(means: MetricComparison, worst: MetricComparison) -> str:
    """Return the panels as HTML, with a legend; a page's choosers hide panels and points."""
    methods, points = means.layout.methods, list_points(means, worst)
    members = [point for condition in points.values() for point in condition.values()]
    if not members:
        return ""
    scales = [_Scale([point[axis] for point in members]) for axis in (0, 1)]
    fronts = _find_fronts(means, points)
    is_named = len(methods) <= _MOST_STYLES
    styles = {m: line_style(place) for place, m in enumerate(methods)} if is_named else {}
    panels = "".join(
        f'<figure class="facet" data-condition="{place}"><figcaption>{html.escape(condition)}'
        f"</figcaption>{_draw_panel(points[condition], fronts[condition], methods, styles, scales)}"
        "</figure>\n"
        for place, condition in enumerate(points)
    )
    legend = "".join(
        f'<span data-method="{place}"><svg viewBox="-6 -6 12 12" width="12" height="12">'
        f"{_draw_marker(style)}</svg> {html.escape(method)}</span>\n"
        for place, (method, style) in enumerate(styles.items())
    )
    names = f'<div class="legend">{legend}</div>\n' if is_named else ""
    axes = '<p class="note">Across: mean over clients. Up: worst 10 % of clients.</p>\n'
    return f'{names}{axes}<div class="facets">\n{panels}</div>\n'


class _Scale:
    """Scale: the range of an axis that all panels share, and its ticks."""

    def __init__(self, numbers: Sequence[float]) -> None:
        low, high = min(numbers), max(numbers)
        margin = 0.08 * (high - low) or 0.08 * abs(high) or 1.0
        self.low, self.high = low - margin, high + margin
        ticks = MaxNLocator(3).tick_values(self.low, self.high)
        self.ticks = [float(tick) for tick in ticks if self.low <= tick <= self.high]

    def place(self, number: float, first: float, last: float) -> float:
        """Return the place of a number between two ends, in pixels."""
        share = (number - self.low) / (self.high - self.low)
        return round(first + share * (last - first), 1)


def _draw_panel(
    members: Mapping[str, tuple[float, float]],
    front: Sequence[str],
    methods: Sequence[str],
    styles: Mapping[str, Mapping[str, Any]],
    scales: Sequence[_Scale],
) -> str:
    """Return the panel of a condition as SVG."""
    places = {
        method: (scales[0].place(x, _LEFT, _RIGHT), scales[1].place(y, _BOTTOM, _TOP))
        for method, (x, y) in members.items()
    }
    corners = " ".join(f"{x},{y}" for x, y in (places[method] for method in front))
    points = "".join(
        f'<g transform="translate({places[method][0]} {places[method][1]})"'
        f' data-method="{place}"{"" if method in front else _FAINT}>'
        f"<title>{html.escape(_describe_point(method, members[method]))}</title>"
        f"{_draw_marker(styles.get(method, _NAMELESS[method in front]))}</g>"
        for place, method in enumerate(methods)
        if method in members
    )
    text = "" if members else f'<text x="{_LEFT + 6}" y="{_TOP + 20}">no result</text>'
    return (
        f'<svg class="panel" viewBox="0 0 {_SIZE[0]} {_SIZE[1]}" role="img" aria-label="front">'
        f"{''.join(_draw_axes(scales))}"
        f'<polyline points="{corners}" fill="none" stroke="{GREY}"/>{points}{text}</svg>'
    )


def _draw_axes(scales: Sequence[_Scale]) -> Iterator[str]:
    """Yield the axes of a panel with ticks and grid lines."""
    for tick in scales[0].ticks:
        x = scales[0].place(tick, _LEFT, _RIGHT)
        yield f'<path class="grid" d="M{x},{_TOP}V{_BOTTOM}"/>'
        yield f'<text x="{x}" y="{_BOTTOM + 14}" text-anchor="middle">{tick:.4g}</text>'
    for tick in scales[1].ticks:
        y = scales[1].place(tick, _BOTTOM, _TOP)
        yield f'<path class="grid" d="M{_LEFT},{y}H{_RIGHT}"/>'
        yield f'<text x="{_LEFT - 4}" y="{y + 3}" text-anchor="end">{tick:.4g}</text>'
    yield f'<path class="axis" d="M{_LEFT},{_TOP}V{_BOTTOM}H{_RIGHT}"/>'


def _draw_marker(style: Mapping[str, Any]) -> str:
    colour = "currentColor" if style["color"] == BLACK else style["color"]
    return f'<path d="{_SHAPES[style["marker"]]}" fill="{colour}"/>'


def _describe_point(method: str, point: tuple[float, float]) -> str:
    return f"{method}: mean {point[0]:.4g}, worst 10 % {point[1]:.4g}"
