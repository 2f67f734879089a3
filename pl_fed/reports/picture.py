"""The style of pictures, and their files: PNG, SVG, and their numbers as CSV."""

import csv
import functools
import hashlib
import html
import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, overload

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from pl_fed.reports.group import Curve, Final, Group
from pl_fed.text import csv_cell, format_csv

_P = ParamSpec("_P")
_T = TypeVar("_T")

BLUE, GOLD, GREEN, VERMILLION = "#0072B2", "#AA7A00", "#009E73", "#D55E00"
SKY, PURPLE, BLACK, GREY = "#2B90CB", "#B95C93", "#000000", "#767676"
COLOURS = (  # after Okabe and Ito, with a contrast of at least 3 to a white and a dark page
    BLUE,
    VERMILLION,
    GREEN,
    GOLD,
    PURPLE,
    SKY,
    BLACK,
)
MARKERS = "os^DvPX"
LINES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)))
FEW = len(COLOURS)  # above this number of lines, each has its number at its end
WIDTH = 5.2
_LEGEND_LENGTH = 60  # letters of a group's name in a legend
_DPI = 150
_INTERVALS, _MAX_POINTS = 800, 10_000  # a picture is up to 780 pixels wide
_MAX_NAME_LENGTH = 100  # of a file, without its digest
_TITLE_LENGTH = 1500  # letters of the description of a picture on a page
_PROLOG = re.compile(r"^.*?(?=<svg)|<metadata>.*?</metadata>|<style .*?</style>", re.DOTALL)
_SIZE = re.compile(r'(?<=<svg ).*?viewBox="([^"]*)".*?>', re.DOTALL)
_ID = re.compile(r'\b(id="|href="#|url\(#)')
_PATH, _DIGITS = re.compile(rb' d="[^"]*"'), re.compile(rb"(\.\d\d)\d+")
_TO_LEFT_EDGE = {"relpos": (0, 0.5), "patchA": None, "shrinkA": 0, "shrinkB": 0}  # cuts are slow
_STYLE = {
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "svg.fonttype": "none",  # text stays text: as paths it would double the size of a page
    "svg.hashsalt": "pl_fed",  # the same picture gives the same file
    "text.parse_math": False,  # a config may hold a $
    "axes.formatter.useoffset": False,
    "hatch.linewidth": 0.5,
}


def _style_context() -> AbstractContextManager[None]:
    return matplotlib.rc_context(_STYLE)  # type: ignore[arg-type]


def apply_style(draw: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function so that it draws in this style, regardless of the user's settings."""

    @functools.wraps(draw)
    def draw_in_style(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with _style_context():
            return draw(*args, **kwargs)

    return draw_in_style


class ColumnTable(Sequence[Mapping[str, Any]]):
    """Column table: equal to a list of rows, but stored by column, for very many rows.

    Args:
        columns: The values of each column, of one length; either numbers or texts.
    """

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return max(map(len, self.columns.values()), default=0)

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, place: slice) -> list[Mapping[str, Any]]: ...

    def __getitem__(self, place: int | slice) -> dict[str, Any] | list[Mapping[str, Any]]:
        if isinstance(place, slice):
            return [self[index] for index in range(len(self))[place]]
        return {name: values[place] for name, values in self.columns.items()}


@dataclass(frozen=True)
class Picture:
    """A picture with its texts and its numbers.

    Attributes:
        name: The name, which includes the name of the model.
        title: The title, in a few words.
        caption: An explanation for readers.
        alt: A description with numbers, for readers who cannot see the picture.
        rows: The numbers in the picture, by column.
        figure: The picture.
        note: A remark on this picture alone, unlike the caption.
    """

    name: str
    title: str
    caption: str
    alt: str
    rows: Sequence[Mapping[str, Any]]
    figure: Figure
    note: str = ""

    @property
    def stem(self) -> str:
        """The name of the picture's files, without suffix: only letters, digits and underscores.

        Names of models may have any characters, so a changed name ends in a digest.
        """
        safe = re.sub(r"\W", "_", self.name, flags=re.ASCII)
        if safe == self.name and len(safe) <= _MAX_NAME_LENGTH:
            return safe
        digest = hashlib.sha256(self.name.encode(errors="backslashreplace")).hexdigest()
        return f"{safe[:_MAX_NAME_LENGTH]}_{digest[:8]}"  # two names may have the same letters

    @property
    def width(self) -> int:
        """The width on a page, in CSS pixels."""
        return round(self.figure.get_figwidth() * 96)

    def png(self) -> bytes:
        """Return the picture as PNG."""
        return self._save(format="png", dpi=_DPI)

    def svg(self, transparent: bool = False) -> bytes:
        """Return the picture as SVG, with coordinates to a hundredth of a point."""
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        content = self._save(format="svg", metadata=no_metadata, transparent=transparent)
        return _PATH.sub(_round_path, content)

    def inline_svg(self) -> str:
        """Return the picture as an SVG element of a page, as wide as its column.

        It has a title and a transparent background. Its names of parts begin with :attr:`stem`, so
        that they differ from those of other pictures. Its black is the colour of the page's text.
        """
        text = _PROLOG.sub("", self.svg(transparent=True).decode())
        text = _ID.sub(rf"\g<1>{self.stem}-", text.replace("xlink:href=", "href="))
        title = f"<title>{html.escape(shorten(self.alt, _TITLE_LENGTH), quote=False)}</title>"
        style = f'style="max-width:{round(1.2 * self.width)}px"'
        size = _SIZE.search(text)
        head = f'class="picture" role="img" viewBox="{size[1] if size else ""}" {style}>{title}'
        return _SIZE.sub(lambda _: head, text, count=1)

    @apply_style
    def _save(self, **options: Any) -> bytes:
        content = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from")  # a box replaces it
            self.figure.savefig(content, **options)
        self.figure.set_layout_engine(
            None
        )  # further files of the picture have the layout of the first
        return content.getvalue()

    def files(self) -> dict[str, bytes]:
        """Return the contents of the PNG and the CSV by file name."""
        return {f"{self.stem}.png": self.png(), f"{self.stem}.csv": encode_csv(self.rows)}


def _round_path(path: re.Match[bytes]) -> bytes:
    return _DIGITS.sub(rb"\1", path[0]).replace(b" \n", b" ")


def encode_csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return rows as the content of a CSV file; rows may have different columns."""
    if isinstance(rows, ColumnTable) and len(rows.columns) > 1:
        return encode(_format_table(rows))
    return encode(format_csv(rows))


def _format_table(table: ColumnTable) -> str:
    """Return a table as CSV; each column is formatted at once, and equal columns only once."""
    texts = {id(cells): _format_cells(cells) for cells in table.columns.values()}
    rows = zip(*(texts[id(cells)] for cells in table.columns.values()))
    header = ",".join(map(_format_text, table.columns))
    return "\n".join([header, *map(",".join, rows), ""])


def _format_cells(cells: Sequence[Any]) -> list[str]:
    """Return the cells of a column as CSV."""
    is_numeric = set(map(type, cells)) <= {int, float}
    return [*map(repr if is_numeric else functools.cache(_format_text), cells)]


def _format_text(text: str) -> str:
    """Return a text as a cell of a CSV file."""
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerow([csv_cell(text), ""])
    return file.getvalue().removesuffix(",\n")


def encode(text: str) -> bytes:
    """Return a text in UTF-8; bytes of a folder's name that are no text are escaped."""
    return text.encode(errors="backslashreplace")


def line_style(place: int) -> dict[str, Any]:
    """Return the colour, marker and line style of the line at a place, from 0."""
    cycle = place // FEW
    marker = MARKERS[(place + 2 * cycle) % len(MARKERS)]
    return {"color": COLOURS[place % FEW], "marker": marker, "ls": LINES[cycle % len(LINES)]}


def make_panels(rows: int, height: float, named: Sequence[Group]) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels below each other.

    Args:
        rows: The number of panels.
        height: The height of a panel, in inches.
        named: The groups whose names need space below the panels.
    """
    legend_height = 0.19 * -(-len(named) // _legend_columns(named))
    figure = Figure(figsize=(WIDTH, rows * height + legend_height + 0.2), layout="constrained")
    panels = figure.subplots(rows, 1, squeeze=False, sharex=True)[:, 0]
    return figure, list(panels)


def make_tiles(number: int) -> tuple[Figure, int, int, dict[str, float]]:
    """Return an empty figure for one panel per group, two panels in a row.

    Args:
        number: The number of panels.

    Returns:
        The figure, its numbers of rows and columns, and its margins and gaps.
    """
    columns = min(2, number)
    rows = -(-number // columns)
    width, height = max(3.7, 2.6 * columns), 0.75 + 1.55 * rows
    margins = {"left": 0.6 / width, "right": 0.985, "top": 1 - 0.3 / height, "bottom": 0.5 / height}
    return Figure(figsize=(width, height)), rows, columns, {**margins, "hspace": 0.42}


def name_groups(
    figure: Figure, groups: Sequence[Group], lines: bool = False, markers: bool = True
) -> None:
    """Write the names of groups below a figure.

    Args:
        figure: The figure.
        groups: The groups; empty for a report of a single group, which needs no names.
        lines: Whether groups are lines in their :func:`line_style`, or numbers.
        markers: Whether the lines have the markers of that style.
    """
    if not groups:
        return
    styles = [line_style(group.number - 1) if lines else {"ls": "none"} for group in groups]
    if not markers:
        styles = [{**style, "marker": ""} for style in styles]
    figure.legend(
        [Line2D([], [], lw=1.4, ms=4, **style) for style in styles],
        [shorten(group.title, _LEGEND_LENGTH) for group in groups],
        loc="outside lower center",
        ncols=_legend_columns(groups),
        columnspacing=1.2,
        handlelength=3 if lines else 0,
    )


def _legend_columns(groups: Sequence[Group]) -> int:
    longest = max((len(shorten(group.title, _LEGEND_LENGTH)) for group in groups), default=0)
    return max(1, min(3, len(groups), 68 // (longest + 8)))


def shorten(text: str, length: int) -> str:
    """Return a text, cut to a length and ended with an ellipsis if it is longer."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def draw_curves(axes: Axes, curves: Mapping[int, Curve]) -> None:
    """Draw each curve and the range over its runs.

    Args:
        axes: The axes.
        curves: The curves by the number of their group.
    """
    for number, curve in curves.items():
        curve = _thin(curve)
        style = line_style(number - 1)
        every = max(1, len(curve.rounds) // 8)
        axes.plot(
            curve.rounds, curve.mean, lw=1.8, ms=4, markevery=(number % every, every), **style
        )
        if max(curve.runs) > 1:
            axes.fill_between(
                curve.rounds, curve.low, curve.high, color=style["color"], alpha=0.18, lw=0
            )


def _thin(curve: Curve) -> Curve:
    """Return the points of a long curve that determine its picture.

    These are both ends, and the extremes of each line in each of 800 intervals of rounds, which are
    narrower than a pixel.
    """
    number = len(curve.rounds)
    if number <= _MAX_POINTS:
        return curve
    edges = np.linspace(0, number, _INTERVALS + 1).astype(np.int64)
    points = {0, number - 1}
    for line in (curve.mean, curve.low, curve.high) if max(curve.runs) > 1 else (curve.mean,):
        values = np.asarray(line)
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist()):
            points |= {
                begin + int(values[begin:end].argmin()),
                begin + int(values[begin:end].argmax()),
            }
    order = sorted(points)
    return Curve(
        [curve.rounds[place] for place in order],
        [curve.mean[place] for place in order],
        [curve.low[place] for place in order],
        [curve.high[place] for place in order],
        [curve.runs[place] for place in order],
    )


def describe_equal_lines(lines: Mapping[int, Sequence[float]]) -> str:
    """Return a sentence on lines that hide each other because they are equal, or an empty string.

    Args:
        lines: The values of each line by the number of its group.

    Example:
        >>> describe_equal_lines({1: [0.5], 2: [0.7], 3: [0.5]})
        'Lines 1 and 3 are equal.'
    """
    numbers: dict[tuple[float, ...], list[int]] = {}
    for number, values in lines.items():
        numbers.setdefault(tuple(values), []).append(number)
    equal = [list(map(str, members)) for members in numbers.values() if len(members) > 1]
    return " ".join(
        f"Lines {', '.join(members[:-1])} and {members[-1]} are equal." for members in equal
    )


def number_ends(axes: Axes, curves: Mapping[int, Curve]) -> None:
    """Write the group's number at the end of each line if there are too many for a legend alone.

    Call it last: the scale and the limits of the axes must be final.

    Args:
        axes: The axes.
        curves: The curves by the number of their group.
    """
    if len(curves) <= FEW:
        return
    last = max(curve.rounds[-1] for curve in curves.values())
    axes.set_xlim(right=last)
    axes.set_ylim(axes.get_ylim())
    fraction = axes.transData + axes.transAxes.inverted()
    ends = {number: (curve.rounds[-1], curve.mean[-1]) for number, curve in curves.items()}
    wanted = {number: float(fraction.transform(end)[1]) for number, end in ends.items()}
    order = sorted(wanted, key=lambda number: wanted[number])
    heights = space_out([wanted[number] for number in order], 0.055 if len(order) < 18 else 0.03)
    for place, (number, height) in enumerate(zip(order, heights)):
        colour = line_style(number - 1)["color"]
        axes.annotate(
            str(number), ends[number], (1.02 + 0.05 * (place % 2), height), "data", "axes fraction",
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.4, **_TO_LEFT_EDGE},
            fontsize=7, va="center", annotation_clip=False,
        )  # fmt: skip


def space_out(places: Sequence[float], gap: float) -> list[float]:
    """Return places in [0, 1] near the given ones, at least a gap apart.

    Args:
        places: The places, in ascending order.
        gap: The smallest distance; reduced if the places would not fit.

    Example:
        >>> space_out([0.5, 0.5, 1.0], 0.25)
        [0.5, 0.75, 1.0]
    """
    gap = min(gap, 1 / max(1, len(places) - 1))
    spaced: list[float] = []
    for place in places:
        spaced.append(max(place, spaced[-1] + gap if spaced else 0.0))
    ceiling = 1.0
    for position in reversed(range(len(spaced))):
        spaced[position] = min(spaced[position], ceiling)
        ceiling = spaced[position] - gap
    return spaced


def error_bars(finals: Iterable[Final]) -> list[list[float]]:
    """Return the lengths of the bars below and above the means, [2, results]."""
    results = list(finals)
    below = [final.mean - final.low for final in results]
    return [below, [final.high - final.mean for final in results]]


def fit_scale(axes: Axes, values: Iterable[float]) -> None:
    """Use a logarithmic scale if all values are positive and differ by a factor above 200."""
    numbers = list(values)
    if numbers and max(numbers) > 200 * min(numbers) > 0:
        axes.set_yscale("log")
        label_logarithmic(axes.yaxis, numbers)


def round_number(value: float) -> float:
    """Return a number rounded to six significant digits."""
    return float(f"{value:.6g}")


def round_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its floats rounded to six significant digits."""
    return {k: round_number(v) if isinstance(v, float) else v for k, v in values.items()}


def label_logarithmic(axis: Axis, values: Sequence[float]) -> None:
    """Label a logarithmic axis with plain numbers; matplotlib's own labels are formulas."""
    within_decades = (1, 2, 5) if max(values) < 100 * min(values) else (1,)
    axis.set_major_locator(LogLocator(subs=within_decades))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
