"""How pictures look, and how they are written: as PNG and SVG, and their numbers as CSV."""

import csv
import functools
import hashlib
import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from pl_fed.reports.group import Curve, Final, Group
from pl_fed.text import csv_cell

_P = ParamSpec("_P")
_T = TypeVar("_T")

BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, BLACK, GREY = "#56B4E9", "#CC79A7", "#000000", "#666666"
COLOURS = (
    BLUE,
    VERMILLION,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    BLACK,
)  # Okabe and Ito's: told apart by all
MARKERS = "os^DvPX"
LINES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)))
FEW = len(COLOURS)  # lines that a legend is enough for: more have their numbers at their ends
WIDTH = 6.4
_DPI = 150
_LONGEST_NAME = 100  # of a file, without its digest
_PATH, _DIGITS = re.compile(rb' d="[^"]*"'), re.compile(rb"(\.\d\d)\d+")
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
    "svg.fonttype": "none",  # letters as such: as paths they would double a page
    "svg.hashsalt": "pl_fed",  # and is the same whenever it is drawn
    "text.parse_math": False,  # a config may hold a $
    "axes.formatter.useoffset": False,
    "hatch.linewidth": 0.5,
}


def _styled() -> AbstractContextManager[None]:
    return matplotlib.rc_context(_STYLE)  # type: ignore[arg-type]


def styled(draw: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a function that makes a figure make it in this style, whatever the user's own is."""

    @functools.wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with _styled():
            return draw(*args, **kwargs)

    return drawn


@dataclass(frozen=True)
class Picture:
    """A picture, and the numbers that it shows.

    Attributes:
        name: Its name, with that of the model that it shows.
        title: What it shows, in a few words.
        caption: How to read it.
        alt: What there is to see, for those who cannot see it.
        rows: Its numbers, by column.
        figure: The picture.
    """

    name: str
    title: str
    caption: str
    alt: str
    rows: Sequence[Mapping[str, Any]]
    figure: Figure

    @property
    def stem(self) -> str:
        """The name of its files, of letters, digits and underscores: a model's name may be any."""
        safe = re.sub(r"\W", "_", self.name, flags=re.ASCII)
        if safe == self.name and len(safe) <= _LONGEST_NAME:
            return safe
        digest = hashlib.sha256(self.name.encode(errors="backslashreplace")).hexdigest()
        return f"{safe[:_LONGEST_NAME]}_{digest[:8]}"  # two names may have the same letters

    @property
    def width(self) -> int:
        """Its width on a page, in CSS pixels."""
        return round(self.figure.get_figwidth() * 96)

    def png(self) -> bytes:
        """Return the picture as PNG."""
        return self._saved(format="png", dpi=_DPI)

    def svg(self) -> bytes:
        """Return the picture as SVG, with coordinates to a hundredth of a point."""
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        return _PATH.sub(_shortened, self._saved(format="svg", metadata=nothing))

    @styled
    def _saved(self, **how: Any) -> bytes:
        content = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from")  # a box stands for it
            self.figure.savefig(content, **how)
        return content.getvalue()

    def files(self) -> dict[str, bytes]:
        """Return PNG and CSV by the names of their files."""
        return {f"{self.stem}.png": self.png(), f"{self.stem}.csv": as_csv(self.rows)}


def _shortened(path: re.Match[bytes]) -> bytes:
    return _DIGITS.sub(rb"\1", path[0]).replace(b" \n", b" ")


def as_csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return rows, which may have different columns, as a file of CSV."""
    file = io.StringIO(newline="")
    columns = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(file, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: csv_cell(cell) if isinstance(cell, str) else cell for name, cell in row.items()}
        for row in rows
    )
    return encoded(file.getvalue())


def encoded(text: str) -> bytes:
    """Return a text in UTF-8; a folder's name may hold bytes that are none."""
    return text.encode(errors="backslashreplace")


def look(place: int) -> dict[str, Any]:
    """Return colour, marker and line of the line at a place."""
    turn = place // FEW
    marker = MARKERS[(place + 2 * turn) % len(MARKERS)]
    return {"color": COLOURS[place % FEW], "marker": marker, "ls": LINES[turn % len(LINES)]}


def sheet(rows: int, height: float, named: Sequence[Group]) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels below each other, with room for the names of groups."""
    room = 0.19 * -(-len(named) // _columns(named))
    figure = Figure(figsize=(WIDTH, rows * height + room + 0.2), layout="constrained")
    panels = figure.subplots(rows, 1, squeeze=False, sharex=True)[:, 0]
    return figure, list(panels)


def tiles(number: int) -> tuple[Figure, int, int, dict[str, float]]:
    """Return a figure for a panel of each group, two beside each other.

    Returns:
        The figure, its lines and columns, and the margins and gaps that leave room for titles.
    """
    columns = min(2, number)
    lines = -(-number // columns)
    width, height = 3.7 * columns, 0.75 + 1.55 * lines
    room = {"left": 0.6 / width, "right": 0.985, "top": 1 - 0.3 / height, "bottom": 0.5 / height}
    return Figure(figsize=(width, height)), lines, columns, {**room, "hspace": 0.42}


def name_groups(figure: Figure, groups: Sequence[Group], lines: bool = False) -> None:
    """Write the names of groups below a figure.

    Args:
        figure: The figure.
        groups: The groups; none where the whole report is of one.
        lines: Whether it shows groups as lines, each with its :func:`look`, or by their numbers.
    """
    if not groups:
        return
    looks = [look(group.number - 1) if lines else {"ls": "none"} for group in groups]
    figure.legend(
        [Line2D([], [], lw=1.4, ms=4, **each) for each in looks],
        [short(group.title, 70) for group in groups],
        loc="outside lower center",
        ncols=_columns(groups),
        columnspacing=1.2,
        handlelength=3 if lines else 0,
    )


def _columns(groups: Sequence[Group]) -> int:
    longest = max((len(short(group.title, 70)) for group in groups), default=0)
    return max(1, min(3, len(groups), 84 // (longest + 8)))


def short(text: str, most: int) -> str:
    """Return the beginning of a text that is too long."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def draw_curves(axes: Axes, curves: Mapping[int, Curve]) -> None:
    """Draw a line for each curve, by its group's number, and the range over its runs."""
    for number, curve in curves.items():
        style = look(number - 1)
        every = max(1, len(curve.rounds) // 8)
        axes.plot(
            curve.rounds, curve.mean, lw=1.4, ms=4, markevery=(number % every, every), **style
        )
        if max(curve.runs) > 1:
            axes.fill_between(
                curve.rounds, curve.low, curve.high, color=style["color"], alpha=0.18, lw=0
            )


def number_ends(axes: Axes, curves: Mapping[int, Curve]) -> None:
    """Write the groups' numbers beside the ends of lines that are too many for a legend alone.

    The scale and the limits of the axes must be what they will be.
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
    heights = spaced([wanted[number] for number in order], 0.055 if len(order) < 18 else 0.03)
    for place, (number, height) in enumerate(zip(order, heights)):
        colour = look(number - 1)["color"]
        axes.annotate(
            str(number), ends[number], (1.02 + 0.05 * (place % 2), height), "data", "axes fraction",
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.4}, color=colour, fontsize=7,
            va="center", annotation_clip=False,
        )  # fmt: skip


def spaced(places: Sequence[float], gap: float) -> list[float]:
    """Return places within [0, 1], near those given, with a gap between them if they have room.

    Args:
        places: From the lowest to the highest.
        gap: Least distance.

    Example:
        >>> spaced([0.5, 0.5, 1.0], 0.25)
        [0.5, 0.75, 1.0]
    """
    gap = min(gap, 1 / max(1, len(places) - 1))
    found: list[float] = []
    for place in places:
        found.append(max(place, found[-1] + gap if found else 0.0))
    ceiling = 1.0
    for position in reversed(range(len(found))):
        found[position] = min(found[position], ceiling)
        ceiling = found[position] - gap
    return found


def bars(found: Iterable[Final]) -> list[list[float]]:
    """Return how far bars over runs reach down and up from their means."""
    finals = list(found)
    return [[each.mean - each.low for each in finals], [each.high - each.mean for each in finals]]


def fit_scale(axes: Axes, values: Iterable[float]) -> None:
    """Use a logarithmic scale for values of very different size, if all are above 0."""
    known = list(values)
    if known and max(known) > 200 * min(known) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def round_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with numbers of six digits."""
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in values.items()}
