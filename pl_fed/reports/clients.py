"""Who gets what: the distribution of the test result over clients."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from pl_fed.reports.group import (
    Group,
    is_lower_better,
    measure_of,
    measures_of_run,
    models_of,
)
from pl_fed.reports.picture import (
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    Picture,
    round_numbers,
    short,
    styled,
    tiles,
)
from pl_fed.reports.run import Run

_MOST_BARS = 120  # more clients than that are drawn by their quantiles
_TAIL = 10  # percent


class Ranks(NamedTuple):
    """Clients from the worst to the best: the value at each rank, [runs, ranks]."""

    values: NDArray[np.float64]

    @property
    def mean(self) -> NDArray[np.float64]:
        """The mean over runs at each rank, [ranks]."""
        return np.asarray(self.values.mean(0))

    @property
    def low(self) -> NDArray[np.float64]:
        """The smallest over runs at each rank, [ranks]."""
        return np.asarray(self.values.min(0))

    @property
    def high(self) -> NDArray[np.float64]:
        """The largest over runs at each rank, [ranks]."""
        return np.asarray(self.values.max(0))

    @property
    def tail(self) -> int:
        """How many clients are the worst tenth, rounded up."""
        return -(-len(self.mean) * _TAIL // 100)


def distributions(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield a picture for each model: clients sorted by their result, and a histogram."""
    measure = measure_of(groups, "test")
    for model in models_of(groups, "test"):
        column = f"{model}_{measure}"
        found = [(group, ranks) for group in groups if (ranks := ranked(group, column)) is not None]
        if not found:
            continue
        title = f"Clients' test {measure}, {model} models"
        caption = (
            "Benign clients from the worst to the best: the worst tenth is hatched, the line is the"
            " mean. On the right, how many clients have how much. Byzantine clients are left out."
        )
        if any(len(group.tested) > 1 for group, _ in found):
            caption += " Where runs are several, a rank is the mean over them, and grey its range."
        alt = "; ".join(f"{group.title}: {_said(ranks)}" for group, ranks in found)
        yield Picture(
            f"clients_{model}",
            title,
            caption,
            f"{title}. {alt}.",
            [row for group, ranks in found for row in _rows(group, ranks, measure)],
            _drawn(found, measure),
        )


def results(run: Run, column: str) -> NDArray[np.float64]:
    """Return a column of ``per_client.csv`` for the benign clients that have a value, sorted."""
    if column not in run.clients:
        return np.empty(0)
    values = run.clients[column]
    kept: NDArray[np.float64] = np.sort(values[run.benign & np.isfinite(values)])
    return kept[::-1] if column.endswith("_loss") or _falls(run, column) else kept


def _falls(run: Run, column: str) -> bool:
    """Return whether smaller values of a column are better."""
    measures = [name for name in measures_of_run(run) if column.endswith(f"_{name}")]
    return bool(measures) and is_lower_better([run], max(measures, key=len))


def ranked(group: Group, column: str) -> Ranks | None:
    """Return a group's clients from the worst to the best; ``None`` if it has none.

    Runs whose numbers of clients differ are brought to that of the one with the most.
    """
    found = [values for run in group.tested if len(values := results(run, column))]
    if not found:
        return None
    most = max(map(len, found))
    shares = (np.arange(most) + 0.5) / most
    return Ranks(np.stack([values[(shares * len(values)).astype(int)] for values in found]))


def _said(ranks: Ranks) -> str:
    worst, best = ranks.mean[: ranks.tail].mean(), ranks.mean[-ranks.tail :].mean()
    return f"mean {ranks.mean.mean():.4g}, worst tenth {worst:.4g}, best tenth {best:.4g}"


@styled
def _drawn(found: Sequence[tuple[Group, Ranks]], measure: str) -> Figure:
    figure, lines, columns, room = tiles(len(found))
    grid = figure.add_gridspec(
        lines, 2 * columns, width_ratios=[3, 1] * columns, wspace=0.1, **room
    )
    bottom, top = 0.0, 1.0
    if measure != "accuracy":
        bottom = min(0.0, *(float(ranks.values.min()) for _, ranks in found))
        top = max(0.0, *(float(ranks.values.max()) for _, ranks in found))
        top = top if top > bottom else 1.0
    margin = 0.04 * (top - bottom)
    for place, (group, ranks) in enumerate(found):
        line, column = divmod(place, columns)
        bars = figure.add_subplot(grid[line, 2 * column])
        side = figure.add_subplot(grid[line, 2 * column + 1], sharey=bars)
        _draw_bars(bars, ranks)
        _draw_histogram(side, ranks, (bottom, top))
        bars.set_ylim(bottom - margin if bottom else 0, top + margin)
        bars.set_title(short(group.title, 52), loc="left", fontsize=8)
        if place + columns >= len(found):
            bars.set_xlabel("clients, from the worst")
            side.set_xlabel("clients")
        bars.tick_params(labelleft=column == 0)
        if column == 0:
            bars.set_ylabel(measure)
    return figure


def _draw_bars(axes: Axes, ranks: Ranks) -> None:
    many = len(ranks.mean) > _MOST_BARS
    places = np.linspace(0, len(ranks.mean) - 1, _MOST_BARS) if many else np.arange(len(ranks.mean))
    chosen = places.round().astype(int)
    edges = np.append(chosen, len(ranks.mean))
    axes.stairs(ranks.mean[chosen], edges, fill=True, color=BLUE, lw=0)
    tail = chosen < ranks.tail
    worst = np.append(chosen[tail], ranks.tail)
    axes.stairs(
        ranks.mean[chosen[tail]], worst, fill=True, fc=ORANGE, ec=BLACK, hatch="////", lw=0.4
    )
    if (ranks.low < ranks.high).any():
        low, high = ranks.low[chosen], ranks.high[chosen]
        axes.stairs(high, edges, baseline=low, fill=True, color=BLACK, alpha=0.3, lw=0)
    axes.axhline(float(ranks.mean.mean()), color=BLACK, ls="--", lw=0.8)
    axes.set_xlim(0, len(ranks.mean))


def _draw_histogram(axes: Axes, ranks: Ranks, ends: tuple[float, float]) -> None:
    counts, edges = np.histogram(ranks.values, bins=20, range=ends)
    axes.stairs(
        counts / len(ranks.values), edges, orientation="horizontal", fill=True, color=GREY, lw=0
    )
    axes.tick_params(labelleft=False)
    axes.xaxis.set_major_locator(MaxNLocator(2, integer=True, prune="lower"))


def _rows(group: Group, ranks: Ranks, measure: str) -> Iterator[dict[str, Any]]:
    points = zip(ranks.mean.tolist(), ranks.low.tolist(), ranks.high.tolist())
    for rank, (mean, low, high) in enumerate(points, 1):
        yield round_numbers(
            {
                "group": group.number,
                "label": group.label,
                "rank": rank,
                measure: mean,
                "min": low,
                "max": high,
                "worst10": int(rank <= ranks.tail),
            }
        )
