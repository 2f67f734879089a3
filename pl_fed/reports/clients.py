"""The distribution of test results over clients."""

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
    list_models,
    list_task_metrics,
    main_metric,
)
from pl_fed.reports.picture import (
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    Picture,
    apply_style,
    make_tiles,
    round_numbers,
    shorten,
)
from pl_fed.reports.run import Run

_MAX_BARS = 120  # more clients are drawn as quantiles
_TAIL = 10  # percent


class Ranks(NamedTuple):
    """Results of clients sorted from worst to best.

    Attributes:
        values: The result at each rank, [runs, ranks].
    """

    values: NDArray[np.float64]

    @property
    def mean(self) -> NDArray[np.float64]:
        """The mean over runs at each rank, [ranks]."""
        return np.asarray(self.values.mean(0))

    @property
    def low(self) -> NDArray[np.float64]:
        """The smallest value over runs at each rank, [ranks]."""
        return np.asarray(self.values.min(0))

    @property
    def high(self) -> NDArray[np.float64]:
        """The largest value over runs at each rank, [ranks]."""
        return np.asarray(self.values.max(0))

    @property
    def tail(self) -> int:
        """The number of clients in the worst 10 %, rounded up."""
        return -(-len(self.mean) * _TAIL // 100)


def draw_distributions(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield a picture for each model: clients sorted by their result, and a histogram."""
    metric = main_metric(groups, "test")
    for model in list_models(groups, "test"):
        column = f"{model}_{metric}"
        panels = [
            (group, ranks) for group in groups if (ranks := rank_clients(group, column)) is not None
        ]
        if not panels:
            continue
        title = f"Clients' test {metric}, {model} models"
        caption = (
            "Benign clients sorted from worst to best. The worst 10 % are hatched; the dashed line"
            " is the mean. The histogram on the right counts clients by result. Byzantine clients"
            " are left out."
        )
        if any(len(group.tested_runs) > 1 for group, _ in panels):
            caption += " With several runs, each rank shows their mean, and their range in grey."
        alt = "; ".join(f"{group.title}: {_describe(ranks)}" for group, ranks in panels)
        yield Picture(
            f"clients_{model}",
            title,
            caption,
            f"{title}. {alt}.",
            [row for group, ranks in panels for row in _rows(group, ranks, metric)],
            _draw(panels, metric),
        )


def benign_results(run: Run, column: str) -> NDArray[np.float64]:
    """Return a column of ``per_client.csv`` sorted from worst to best.

    Byzantine clients and clients without a finite value are left out.
    """
    if column not in run.clients:
        return np.empty(0)
    values = run.clients[column]
    results: NDArray[np.float64] = np.sort(values[run.benign & np.isfinite(values)])
    return results[::-1] if column.endswith("_loss") or _is_lower_better(run, column) else results


def _is_lower_better(run: Run, column: str) -> bool:
    """Return whether smaller values of a column are better."""
    metrics = [name for name in list_task_metrics(run) if column.endswith(f"_{name}")]
    return bool(metrics) and is_lower_better([run], max(metrics, key=len))


def rank_clients(group: Group, column: str) -> Ranks | None:
    """Return the sorted results of a group's clients, or ``None`` if there are none.

    Runs with fewer clients are stretched to the largest number of clients in the group.
    """
    rows = [values for run in group.tested_runs if len(values := benign_results(run, column))]
    if not rows:
        return None
    num_ranks = max(map(len, rows))
    shares = (np.arange(num_ranks) + 0.5) / num_ranks
    return Ranks(np.stack([values[(shares * len(values)).astype(int)] for values in rows]))


def _describe(ranks: Ranks) -> str:
    worst, best = ranks.mean[: ranks.tail].mean(), ranks.mean[-ranks.tail :].mean()
    return f"mean {ranks.mean.mean():.4g}, worst 10 %: {worst:.4g}, best 10 %: {best:.4g}"


@apply_style
def _draw(panels: Sequence[tuple[Group, Ranks]], metric: str) -> Figure:
    figure, lines, columns, margins = make_tiles(len(panels))
    grid = figure.add_gridspec(
        lines, 2 * columns, width_ratios=[3, 1] * columns, wspace=0.1, **margins
    )
    bottom, top = 0.0, 1.0
    if metric != "accuracy":
        bottom = min(0.0, *(float(ranks.values.min()) for _, ranks in panels))
        top = max(0.0, *(float(ranks.values.max()) for _, ranks in panels))
        top = top if top > bottom else 1.0
    margin = 0.04 * (top - bottom)
    for place, (group, ranks) in enumerate(panels):
        line, column = divmod(place, columns)
        bars = figure.add_subplot(grid[line, 2 * column])
        side = figure.add_subplot(grid[line, 2 * column + 1], sharey=bars)
        _draw_bars(bars, ranks)
        _draw_histogram(side, ranks, (bottom, top))
        bars.set_ylim(bottom - margin if bottom else 0, top + margin)
        bars.set_title(shorten(group.title, 52), loc="left", fontsize=8)
        if place + columns >= len(panels):
            bars.set_xlabel("clients, worst first")
            side.set_xlabel("clients")
        bars.tick_params(labelleft=column == 0)
        if column == 0:
            bars.set_ylabel(metric)
    return figure


def _draw_bars(axes: Axes, ranks: Ranks) -> None:
    num_ranks = len(ranks.mean)
    is_long = num_ranks > _MAX_BARS
    places = np.linspace(0, num_ranks - 1, _MAX_BARS) if is_long else np.arange(num_ranks)
    chosen = places.round().astype(int)
    edges = np.append(chosen, num_ranks)
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
    axes.set_xlim(0, num_ranks)


def _draw_histogram(axes: Axes, ranks: Ranks, ends: tuple[float, float]) -> None:
    counts, edges = np.histogram(ranks.values, bins=20, range=ends)
    axes.stairs(
        counts / len(ranks.values), edges, orientation="horizontal", fill=True, color=GREY, lw=0
    )
    axes.tick_params(labelleft=False)
    axes.xaxis.set_major_locator(MaxNLocator(2, integer=True, prune="lower"))


def _rows(group: Group, ranks: Ranks, metric: str) -> Iterator[dict[str, Any]]:
    points = zip(ranks.mean.tolist(), ranks.low.tolist(), ranks.high.tolist())
    for rank, (mean, low, high) in enumerate(points, 1):
        yield round_numbers(
            {
                "group": group.number,
                "label": group.label,
                "rank": rank,
                metric: mean,
                "min": low,
                "max": high,
                "worst10": int(rank <= ranks.tail),
            }
        )
