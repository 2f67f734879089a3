"""Pictures of a study's report: heat maps, fronts of mean against worst 10 %, average ranks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from pl_fed.reports.critical_difference import draw_critical_difference
from pl_fed.reports.picture import (
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
from pl_fed.statistics import RankComparison
from pl_fed.studies.comparison import MetricComparison
from pl_fed.studies.tables import (
    DIVERGED_RULE,
    SEEDS_RULE,
    describe_metric,
    format_number,
    name_files,
)

WORST10 = "_worst10"
"""End of the names of metrics over the worst tenth of the clients."""

_WORST = "worst case"
_COLOURS = "viridis"  # brighter means better, also in shades of grey
_DARK, _LIGHT = "#111111", "#fafafa"  # of numbers on a colour; not the colour of a page's text
_GAP = 0.3  # between conditions and the worst case, in fields
_FACETS = 6  # in a row
_FACET = 1.75  # inches
_NAME_LENGTH = 34
_MOST_STYLES = len(COLOURS) * len(LINES)
_TINY: dict[str, Any] = {"fontsize": 7, "ha": "center", "va": "center"}


def draw_pictures(comparisons: Sequence[MetricComparison]) -> Iterator[Picture]:
    """Yield the pictures of a study: for each metric a heat map and average ranks, and fronts.

    Args:
        comparisons: The comparisons of the methods by each metric.
    """
    for comparison in comparisons:
        yield draw_heat_map(comparison)
        if comparison.ranks is not None:
            yield _draw_ranks(comparison.metric, comparison.ranks)
    by_metric = {comparison.metric: comparison for comparison in comparisons}
    for metric, comparison in by_metric.items():
        if worst := by_metric.get(f"{metric}{WORST10}"):
            yield draw_fronts(comparison, worst)


def _draw_ranks(metric: str, ranks: RankComparison) -> Picture:
    """Return the critical-difference diagram; its blocks are seeds."""
    name = f"ranks_{name_files(metric)}"
    picture = draw_critical_difference(ranks, name, describe_metric(metric))
    note = "A block is a seed, with the mean rank over conditions. Seeds are independent blocks."
    return replace(picture, note=f"{picture.note} {note}".strip())


# Heat map


def draw_heat_map(comparison: MetricComparison) -> Picture:
    """Return the heat map of methods × conditions, with the worst case of each method.

    Conditions are rows if they are more than the methods.
    """
    layout, metric = comparison.layout, describe_metric(comparison.metric)
    columns = [*layout.conditions, *([_WORST] if len(layout.conditions) > 1 else [])]
    means = {
        (method, condition): _read_mean(comparison, method, condition)
        for method in layout.methods
        for condition in columns
        if condition == _WORST or (method, condition) in comparison.entries
    }
    texts = {key: _label(comparison, key, mean, means) for key, mean in means.items()}
    rows = [
        round_numbers({"method": method, "condition": condition, "mean": mean, "text": texts[key]})
        for key, mean in means.items()
        for method, condition in [key]
    ]
    caption = (
        "Mean over seeds of each method under each condition, and its worst case over conditions."
        f" {'Larger' if comparison.is_higher_better else 'Smaller'} values are better, in brighter"
        f" colours. Hatched fields have no mean: a run diverged, or none has a result. {SEEDS_RULE}"
    )
    worst = "; ".join(f"{method} {texts[method, columns[-1]]}" for method in layout.methods)
    alt = f"Heat map of {metric}. {columns[-1]}: {worst}."
    has_diverged = any(entry.diverged for entry in comparison.entries.values())
    return Picture(
        f"heat_map_{name_files(comparison.metric)}",
        f"Methods and conditions by {metric}",
        caption,
        alt,
        rows,
        _draw_fields(layout.methods, columns, means, texts, comparison.is_higher_better),
        DIVERGED_RULE if has_diverged else "",
    )


def _read_mean(comparison: MetricComparison, method: str, condition: str) -> float | None:
    if condition == _WORST:
        return comparison.find_worst(method).mean
    return comparison.entries[method, condition].mean


def _label(
    comparison: MetricComparison,
    key: tuple[str, str],
    mean: float | None,
    means: Mapping[tuple[str, str], float | None],
) -> str:
    """Return the text of a field."""
    method, condition = key
    if condition == _WORST:
        worst = comparison.find_worst(method)
        bound = ("≤" if comparison.is_higher_better else "≥") if worst.is_bound else ""
        has_diverged = worst.has_diverged
    else:
        bound, has_diverged = "", bool(comparison.entries[key].diverged)
    if mean is None:
        return "div." if has_diverged else "–"
    largest = max((abs(item) for item in means.values() if item is not None), default=1.0)
    digits = math.floor(math.log10(0.999 * largest)) if largest > 0 else 0  # three of 1, too
    text = format_number(mean, min(6, max(0, 2 - digits)))
    return f"{bound}{text.removeprefix('0') if 0 < mean < 1 else text}"


@apply_style
def _draw_fields(
    methods: Sequence[str],
    columns: Sequence[str],
    means: Mapping[tuple[str, str], float | None],
    texts: Mapping[tuple[str, str], str],
    is_higher: bool,
) -> Figure:
    """Draw a field for each method and condition; the longer side is vertical."""
    is_upright = len(columns) > max(6, len(methods))
    across, down = (methods, columns) if is_upright else (columns, methods)
    names = [shorten(name, _NAME_LENGTH) for name in across]
    longest = max(len(shorten(name, _NAME_LENGTH)) for name in down)
    turned = max(map(len, names)) > 7
    margin_left = 0.2 + 0.075 * longest
    margin_top = 0.25 + 0.055 * max(map(len, names)) if turned else 0.35
    width = margin_left + 0.44 * len(across) + 0.5
    height = margin_top + 0.24 * len(down) + 0.15
    figure = Figure(figsize=(max(width, 3.0), height), layout="constrained")
    axes = figure.subplots()
    finite = [mean for mean in means.values() if mean is not None]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    colour_map = matplotlib.colormaps[_COLOURS if is_higher else f"{_COLOURS}_r"]
    gap = _GAP if _WORST in columns else 0.0
    ends = [float(place) for place in range(len(columns))]
    ends[-1] += gap
    for method in range(len(methods)):
        for place, condition in zip(ends, columns):
            key = (methods[method], condition)
            if key in means:
                x, y = (method, place) if is_upright else (place, method)
                mean = means[key]
                share = 0.5 if high == low or mean is None else (mean - low) / (high - low)
                _draw_field(axes, (x, y), None if mean is None else colour_map(share), texts[key])
    across_ends, down_ends = (
        (range(len(methods)), ends) if is_upright else (ends, range(len(methods)))
    )
    axes.set_xlim(-0.5, across_ends[-1] + 0.5)
    axes.set_ylim(down_ends[-1] + 0.5, -0.5)
    turn: dict[str, Any] = {"rotation": 40, "ha": "left", "rotation_mode": "anchor"}
    axes.set_xticks(across_ends, names, fontsize=8, **(turn if turned else {}))
    axes.set_yticks(down_ends, [shorten(name, _NAME_LENGTH) for name in down], fontsize=8)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def _draw_field(axes: Axes, place: tuple[float, float], colour: Any, text: str) -> None:
    """Draw a field with its number; hatched without a colour."""
    corner = (place[0] - 0.5, place[1] - 0.5)
    if colour is None:
        style: dict[str, Any] = {"facecolor": "none", "edgecolor": GREY, "hatch": "////", "lw": 0}
        axes.add_patch(Rectangle(corner, 1, 1, **style))
        box = {"facecolor": "#ffffff", "edgecolor": "none", "pad": 1}
        axes.text(*place, text, color=_DARK, bbox=box, **_TINY)
        return
    axes.add_patch(Rectangle(corner, 1, 1, facecolor=colour, lw=0))
    is_bright = float(np.dot(colour[:3], (0.3, 0.6, 0.1))) > 0.5
    axes.text(*place, text, color=_DARK if is_bright else _LIGHT, **_TINY)


# Fronts


def draw_fronts(means: MetricComparison, worst: MetricComparison) -> Picture:
    """Return the picture of the mean against the worst 10 % of clients, a panel per condition.

    A line joins the methods that no other method beats in both (the Pareto front).

    Args:
        means: The comparison by the mean over clients.
        worst: The comparison by the mean of the worst tenth of the clients.
    """
    layout, metric = means.layout, describe_metric(means.metric)
    points = {
        condition: {
            method: (x, y)
            for method in layout.methods
            if (method, condition) in means.entries
            and (x := means.entries[method, condition].mean) is not None
            and (y := worst.entries[method, condition].mean) is not None
        }
        for condition in layout.conditions
    }
    fronts = {
        condition: find_front(members, means.is_higher_better)
        for condition, members in points.items()
    }
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
    absent = sum(entry.mean is None for entry in means.entries.values())
    note = f"{absent} points are missing: their runs diverged, or have no result." if absent else ""
    caption = (
        "A point is a method: mean over all clients, and mean over the worst 10 % of clients, both"
        f" averaged over seeds. The {'upper right' if means.is_higher_better else 'lower left'} is"
        " best. The line joins methods that no other one beats in both. It is drawn through"
        f" estimates, so methods near it may belong to it. {SEEDS_RULE}"
    )
    return Picture(
        f"front_{name_files(means.metric)}",
        f"Mean against worst 10 % of clients by {metric}",
        caption,
        f"Methods that no other one beats in {metric} and its worst 10 %, by condition. {texts}.",
        rows,
        _draw_facets(layout.methods, points, fronts),
        note,
    )


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


@apply_style
def _draw_facets(
    methods: Sequence[str],
    points: Mapping[str, Mapping[str, tuple[float, float]]],
    fronts: Mapping[str, Sequence[str]],
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
        axes.set_title(shorten(condition, 26 if columns > 1 else 60), fontsize=8)
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
