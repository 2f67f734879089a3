"""Critical-difference diagram: methods on a line of average ranks, joined where they do not differ.

Source: J. Demšar, "Statistical Comparisons of Classifiers over Multiple Data Sets", Journal of
Machine Learning Research 7, 2006, figure 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from pl_fed.reports.picture import (
    BLACK,
    WIDTH,
    Picture,
    apply_style,
    line_style,
    round_numbers,
    shorten,
)
from pl_fed.statistics import RankComparison, format_p_value

_ROW = 0.24  # height of a name, in inches
_NAME_LENGTH = 34
_SMALL: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "annotation_clip": False}


def draw_critical_difference(
    comparison: RankComparison,
    name: str = "ranks",
    metric: str = "accuracy",
    styles: Mapping[str, Mapping[str, Any]] | None = None,
) -> Picture:
    """Return the critical-difference diagram of a comparison by ranks.

    Args:
        comparison: The comparison, by :func:`pl_fed.statistics.compare_ranks`.
        name: The name of the picture's files.
        metric: The ranked metric, for the texts.
        styles: The ``color`` and ``marker`` of each method, to share them with other pictures; by
            default they are those of its place among the ranks.
    """
    friedman = comparison.friedman
    caption = (
        f"Average ranks over {friedman.blocks} blocks, 1 for the best. A bar joins methods with"
        f" ranks closer than Nemenyi's critical difference {comparison.difference:.2f}"
        f" (α = {comparison.alpha:g}). Friedman's test that all methods are equal: p"
        f" {_compare(friedman.p_value)}."
    )
    note = ""
    if friedman.p_value > comparison.alpha:
        note = "Friedman's test does not reject, so no method is shown to differ."
    pairs = zip(comparison.names, comparison.average_ranks.tolist())
    alt = "; ".join(f"{method} {rank:.2f}" for method, rank in pairs)
    rows = [
        round_numbers(
            {"method": method, "average_rank": rank, "groups": _list_groups(comparison, place)}
        )
        for place, (method, rank) in enumerate(
            zip(comparison.names, comparison.average_ranks.tolist())
        )
    ]
    title = f"Average ranks by {metric}"
    if styles is None:
        styles = {method: line_style(place) for place, method in enumerate(comparison.names)}
    figure = _draw(comparison, styles)
    return Picture(name, title, caption, f"{title}. {alt}.", rows, figure, note)


def _compare(p_value: float) -> str:
    text = format_p_value(p_value)
    return text if text.startswith("<") else f"= {text}"


def _list_groups(comparison: RankComparison, place: int) -> str:
    """Return the numbers of the groups of equal methods, from 1, that a place belongs to."""
    groups = enumerate(comparison.groups, 1)
    return " ".join(str(number) for number, (first, last) in groups if first <= place <= last)


@apply_style
def _draw(comparison: RankComparison, styles: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw a row for each method, from the best to the worst, and a bar for each group."""
    methods, lanes = len(comparison.names), _arrange_lanes(comparison.groups)
    figure = Figure(figsize=(WIDTH, 1.05 + _ROW * methods), layout="constrained")
    axes = figure.subplots()
    for row, (method, rank) in enumerate(zip(comparison.names, comparison.average_ranks)):
        colour, marker = styles[method]["color"], styles[method]["marker"]
        axes.plot([1, rank], [row, row], color=colour, lw=0.8, alpha=0.5)
        axes.plot([rank], [row], marker, color=colour, ms=6)
        axes.annotate(f"{rank:.2f}", (rank, row), (7, 0), va="center", **_SMALL)
    gap = 0.04 * methods
    for group, lane in zip(comparison.groups, lanes):
        x = methods + (2 + lane) * gap
        ends = [group[0] - 0.25, group[1] + 0.25]
        axes.plot([x, x], ends, color=BLACK, lw=2.5, solid_capstyle="butt")
    scale_end = min(float(methods), 1 + comparison.difference)
    axes.plot([1, scale_end], [-0.75, -0.75], color=BLACK, lw=1.5, marker="|", ms=6)
    text = f"critical difference {comparison.difference:.2f}"
    if comparison.difference > methods - 1:
        text += ", more than ranks can differ"
    axes.annotate(text, (1, -0.75), (0, 4), va="bottom", **_SMALL)
    names = [shorten(name, _NAME_LENGTH) for name in comparison.names]
    axes.set_yticks(range(methods), names)
    axes.set_ylim(methods - 0.5, -1.6)
    axes.set_xlim(1 - gap, methods + (3 + max(lanes, default=-1)) * gap)
    axes.set_xticks(range(1, methods + 1, -(-methods // 12)))
    axes.set_xlabel("average rank (1 is the best)")
    axes.grid(visible=False, axis="y")
    return figure


def _arrange_lanes(groups: Sequence[tuple[int, int]]) -> list[int]:
    """Return a lane for the bar of each group: the first one without a bar at its places.

    Example:
        >>> _arrange_lanes([(0, 2), (1, 3), (3, 4)])
        [0, 1, 0]
    """
    lanes: list[int] = []
    last_places: list[int] = []
    for first, last in groups:
        free = [lane for lane, place in enumerate(last_places) if place < first]
        lane = free[0] if free else len(last_places)
        last_places[lane : lane + 1] = [last]
        lanes.append(lane)
    return lanes
