"""Heat map of methods × conditions, as a picture and as a table of a page."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pl_fed.reports.picture import GREY, Picture, apply_style, round_numbers, shorten
from pl_fed.studies.comparison import MetricComparison
from pl_fed.studies.tables import (
    DIVERGED_RULE,
    SEEDS_RULE,
    WORST,
    describe_metric,
    format_number,
    name_files,
)

_COLOURS = "viridis"  # brighter means better, also in shades of grey
_DARK, _LIGHT = "#111111", "#fafafa"  # of numbers on a colour; not the colour of a page's text
_GAP = 0.3  # between conditions and the worst case, in fields
_NAME_LENGTH = 34
_MOST_ROWS = 40  # of a part of a page that does not scroll by itself
_TINY: dict[str, Any] = {"fontsize": 7, "ha": "center", "va": "center"}


@dataclass(frozen=True)
class Field:
    """Field: the mean of a method under a condition.

    Attributes:
        method: The method.
        condition: The condition; ``None`` for the worst case over conditions.
        mean: The mean over seeds; ``None`` if a run diverged, or none has a result.
        text: The mean with few digits.
        colour: Its colour, such as ``#440154``; ``None`` without a mean.
        is_bright: Whether dark letters are read on this colour.
    """

    method: str
    condition: str | None
    mean: float | None
    text: str
    colour: str | None = None
    is_bright: bool = True


def list_fields(comparison: MetricComparison) -> dict[tuple[str, str | None], Field]:
    """Return the fields of a heat map by method and condition; none of a combination left out."""
    means = _list_means(comparison)
    finite = [mean for mean in means.values() if mean is not None]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    is_higher = comparison.is_higher_better
    colour_map = matplotlib.colormaps[_COLOURS if is_higher else f"{_COLOURS}_r"]
    fields = {}
    for key, mean in means.items():
        text = _describe_mean(comparison, *key, mean, max(map(abs, finite), default=1.0))
        if mean is None:
            fields[key] = Field(*key, None, text)
            continue
        colour = colour_map(0.5 if high == low else (mean - low) / (high - low))
        is_bright = float(np.dot(colour[:3], (0.3, 0.6, 0.1))) > 0.5
        fields[key] = Field(*key, mean, text, matplotlib.colors.to_hex(colour), is_bright)
    return fields


def _list_means(comparison: MetricComparison) -> dict[tuple[str, str | None], float | None]:
    """Return the means by method and condition, and the worst cases by method and ``None``."""
    means: dict[tuple[str, str | None], float | None] = {
        key: entry.mean for key, entry in comparison.entries.items()
    }
    if len(comparison.layout.conditions) > 1:
        for method in comparison.layout.methods:
            means[method, None] = comparison.find_worst(method).mean
    return means


def _describe_mean(
    comparison: MetricComparison,
    method: str,
    condition: str | None,
    mean: float | None,
    largest: float,
) -> str:
    """Return the text of a field, with three digits of the largest number."""
    bound = ""
    if condition is None:
        worst = comparison.find_worst(method)
        has_diverged = worst.has_diverged
        if worst.is_bound:
            bound = "≤" if comparison.is_higher_better else "≥"
    else:
        has_diverged = bool(comparison.entries[method, condition].diverged)
    if mean is None:
        return "div." if has_diverged else "–"
    if abs(mean) >= 1e4 or 0 < largest < 1e-3:
        return f"{bound}{mean:.1e}".replace("-", "−").replace("e+0", "e").replace("e−0", "e−")
    digits = math.floor(math.log10(0.999 * largest)) if largest > 0 else 0  # three of 1, too
    text = format_number(mean, min(6, max(0, 2 - digits)))
    return f"{bound}{text.removeprefix('0') if 0 < mean < 1 else text}"


def draw_heat_map(comparison: MetricComparison) -> Picture:
    """Return the heat map of methods × conditions, with the worst case of each method.

    Conditions are rows if they are more than six, and more than the methods.
    """
    layout, metric = comparison.layout, describe_metric(comparison.metric)
    fields = list_fields(comparison)
    columns = list_columns(comparison)
    rows = [
        round_numbers(
            {
                "method": field.method,
                "condition": WORST if field.condition is None else field.condition,
                "mean": field.mean,
                "text": field.text,
            }
        )
        for condition in columns
        for method in layout.methods
        if (field := fields.get((method, condition))) is not None
    ]
    last = columns[-1]
    worst = "; ".join(
        f"{method} {fields[method, last].text}"
        for method in layout.methods
        if (method, last) in fields
    )
    has_diverged = any(entry.diverged for entry in comparison.entries.values())
    return Picture(
        f"heat_map_{name_files(comparison.metric)}",
        f"Methods and conditions by {metric}",
        describe_heat_map(comparison),
        f"Heat map of {metric}. {WORST if last is None else last}: {worst}.",
        rows,
        _draw_fields(layout.methods, columns, fields),
        DIVERGED_RULE if has_diverged else "",
    )


def list_columns(comparison: MetricComparison) -> list[str | None]:
    """Return the conditions, and ``None`` for the worst case if there are several."""
    conditions = comparison.layout.conditions
    return [*conditions, None] if len(conditions) > 1 else [*conditions]


def describe_heat_map(comparison: MetricComparison) -> str:
    """Return the caption of a heat map."""
    return (
        "Mean over seeds of each method under each condition, and its worst case over conditions."
        f" {'Larger' if comparison.is_higher_better else 'Smaller'} values are better, in brighter"
        f" colours. Hatched fields have no mean: a run diverged, or none has a result. {SEEDS_RULE}"
    )


def is_upright(comparison: MetricComparison) -> bool:
    """Return whether conditions are rows."""
    layout = comparison.layout
    return len(list_columns(comparison)) > max(6, len(layout.methods))


@apply_style
def _draw_fields(
    methods: Sequence[str],
    columns: Sequence[str | None],
    fields: Mapping[tuple[str, str | None], Field],
) -> Figure:
    """Draw a field for each method and condition; the longer side is vertical."""
    names = [WORST if column is None else column for column in columns]
    places = [float(place) for place in range(len(columns))]
    places[-1] += _GAP if columns[-1] is None else 0.0
    upright = len(columns) > max(6, len(methods))
    across, down = (methods, names) if upright else (names, methods)
    across_places: Sequence[float] = range(len(methods)) if upright else places
    down_places: Sequence[float] = places if upright else range(len(methods))
    across_names = [shorten(name, _NAME_LENGTH) for name in across]
    down_names = [shorten(name, _NAME_LENGTH) for name in down]
    turned = max(map(len, across_names)) > 7
    margin_left = 0.2 + 0.075 * max(map(len, down_names))
    margin_top = 0.25 + 0.055 * max(map(len, across_names)) if turned else 0.35
    width = margin_left + 0.44 * len(across) + 0.5
    height = margin_top + 0.24 * len(down) + 0.15
    figure = Figure(figsize=(max(width, 3.0), height), layout="constrained")
    axes = figure.subplots()
    for row, method in enumerate(methods):
        for place, condition in zip(places, columns):
            if (field := fields.get((method, condition))) is not None:
                _draw_field(axes, (row, place) if upright else (place, row), field)
    axes.set_xlim(-0.5, across_places[-1] + 0.5)
    axes.set_ylim(down_places[-1] + 0.5, -0.5)
    turn: dict[str, Any] = {"rotation": 40, "ha": "left", "rotation_mode": "anchor"}
    axes.set_xticks(across_places, across_names, fontsize=8, **(turn if turned else {}))
    axes.set_yticks(down_places, down_names, fontsize=8)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def _draw_field(axes: Axes, place: tuple[float, float], field: Field) -> None:
    """Draw a field with its number; hatched without a mean."""
    corner = (place[0] - 0.5, place[1] - 0.5)
    if field.colour is None:
        style: dict[str, Any] = {"facecolor": "none", "edgecolor": GREY, "hatch": "////", "lw": 0}
        axes.add_patch(Rectangle(corner, 1, 1, **style))
        box = {"facecolor": "#ffffff", "edgecolor": "none", "pad": 1}
        axes.text(*place, field.text, color=_DARK, bbox=box, **_TINY)
        return
    axes.add_patch(Rectangle(corner, 1, 1, facecolor=field.colour, lw=0))
    axes.text(*place, field.text, color=_DARK if field.is_bright else _LIGHT, **_TINY)


def render_heat_map(comparison: MetricComparison) -> str:
    """Return the heat map as an HTML table; a page's choosers hide rows and columns."""
    layout, fields = comparison.layout, list_fields(comparison)
    columns, upright = list_columns(comparison), is_upright(comparison)
    heads = [
        (f' data-condition="{place}"' if name is not None else "", name or WORST)
        for place, name in enumerate(columns)
    ]
    methods = [(f' data-method="{place}"', name) for place, name in enumerate(layout.methods)]
    across, down = (methods, heads) if upright else (heads, methods)
    top = "".join(f'<th scope="col"{side}>{html.escape(name)}</th>' for side, name in across)
    body = ""
    for row, (side, name) in enumerate(down):
        cells = ""
        for place, (other, _) in enumerate(across):
            method, column = (place, row) if upright else (row, place)
            field = fields.get((layout.methods[method], columns[column]))
            cells += f"<td{_style_field(field)}{side}{other}>{field.text if field else ''}</td>"
        body += f'<tr{side}><th scope="row">{html.escape(name)}</th>{cells}</tr>\n'
    return (
        f'<div class="wide study{name_length(len(down))}" tabindex="0" role="region"'
        ' aria-label="heat map">'
        f'<table class="heat"><thead><tr><td></td>{top}</tr></thead>\n<tbody>\n{body}</tbody>'
        "</table></div>\n"
    )


def name_length(rows: int) -> str:
    """Return a class for a part of a page with so many rows, after a space; empty for few."""
    return " long" if rows > _MOST_ROWS else ""


def _style_field(field: Field | None) -> str:
    """Return the attributes of a field's colour."""
    if field is None:
        return ' class="absent"'
    if field.colour is None:
        return ' class="hatched"'
    letters = _DARK if field.is_bright else _LIGHT
    return f' style="background:{field.colour};color:{letters}"'
