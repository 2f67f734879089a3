"""The distribution of test results over clients."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pl_fed.reports.comparisons import list_benefits
from pl_fed.reports.group import (
    Group,
    is_lower_better,
    list_models,
    list_task_metrics,
    main_metric,
)
from pl_fed.reports.picture import (
    GREY,
    Picture,
    apply_style,
    describe_equal_lines,
    line_style,
    make_panels,
    name_groups,
    round_numbers,
)
from pl_fed.reports.run import Run

_MAX_STEPS = 120  # more clients are drawn as quantiles
_TAIL = 10  # percent


class Ranks(NamedTuple):
    """Results of clients sorted from worst to best.

    Attributes:
        values: The result at each rank, [runs, ranks].
    """

    values: NDArray[np.float64]

    @classmethod
    def stretch(cls, rows: Sequence[NDArray[np.float64]]) -> "Ranks":
        """Return the ranks of runs, stretched to the largest number of clients.

        Args:
            rows: The sorted results of each run, [clients] each; at least one run.
        """
        num_ranks = max(map(len, rows))
        shares = (np.arange(num_ranks) + 0.5) / num_ranks
        return cls(np.stack([values[(shares * len(values)).astype(int)] for values in rows]))

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
    """Yield a picture for each model: a line for each group over its clients, worst first."""
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
            "Benign clients sorted from worst to best; the worst 10 % are shaded. A flat line is"
            " fair. Byzantine clients are left out."
        )
        if any(len(group.tested_runs) > 1 for group, _ in panels):
            caption += " With several runs, each rank shows their mean and their range."
        caption += _describe_diverged(
            sum(_count_diverged(group, model, metric) for group, _ in panels)
        )
        lines = {group.number: ranks.mean.tolist() for group, ranks in panels}
        alt = "; ".join(f"{group.title}: {_describe(ranks)}" for group, ranks in panels)
        named = [group for group, _ in panels] if len(groups) > 1 else []
        yield Picture(
            f"clients_{model}",
            title,
            caption,
            f"{title}. {alt}.",
            [row for group, ranks in panels for row in _rows(group, ranks, metric)],
            _draw(panels, metric, named),
            describe_equal_lines(lines),
        )


def draw_gains(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield the picture of clients' gains over local training: a line for each other group."""
    metric = main_metric(groups, "test")
    panels, num_diverged = [], 0
    for group, benefits in list_benefits(groups):
        rows = [np.sort(benefit.gains) for benefit in benefits]
        panels.append((group, Ranks.stretch(rows)))
        num_diverged += sum(benefit.num_diverged for benefit in benefits)
    if not panels:
        return
    title = f"Clients' gains in test {metric} over local training"
    caption = (
        "Differences from local training of the same client, sorted from the largest loss to the"
        " largest gain. A client below the line at 0 is better off alone."
    )
    caption += _describe_diverged(num_diverged)
    alt = "; ".join(f"{group.title}: {_describe(ranks)}" for group, ranks in panels)
    yield Picture(
        "gains",
        title,
        caption,
        f"{title}. {alt}.",
        [row for group, ranks in panels for row in _rows(group, ranks, f"gain in {metric}")],
        _draw(panels, f"gain in {metric}", [group for group, _ in panels], zero=True),
        describe_equal_lines({group.number: ranks.mean.tolist() for group, ranks in panels}),
    )


def _count_diverged(group: Group, model: str, metric: str) -> int:
    """Return the number of results of benign clients whose models have diverged, over the seeds."""
    column = f"{model}_{metric}"
    runs = [run for run in group.tested_runs if len(benign_results(run, column))]
    return sum(
        int(
            (run.benign & run.mark_results(model, metric) & ~np.isfinite(run.clients[column])).sum()
        )
        for run in group.first_of_seeds(runs)
    )


def _describe_diverged(number: int) -> str:
    """Return a sentence about results that a picture leaves out; empty if there are none."""
    if not number:
        return ""
    return f" Clients whose models have diverged are left out, and are worse than all: {number}."


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
    runs = [run for run in group.tested_runs if len(benign_results(run, column))]
    rows = [benign_results(run, column) for run in group.first_of_seeds(runs)]
    return Ranks.stretch(rows) if rows else None


def _describe(ranks: Ranks) -> str:
    worst, best = ranks.mean[: ranks.tail].mean(), ranks.mean[-ranks.tail :].mean()
    return f"mean {ranks.mean.mean():.4g}, worst 10 %: {worst:.4g}, best 10 %: {best:.4g}"


@apply_style
def _draw(
    panels: Sequence[tuple[Group, Ranks]], metric: str, named: Sequence[Group], zero: bool = False
) -> Figure:
    """Return the figure of the lines of groups, with a line at 0 on demand."""
    figure, (axes,) = make_panels(1, 2.9, named)
    for group, ranks in panels:
        _draw_quantiles(axes, ranks, line_style(group.number - 1))
    if zero:
        axes.axhline(0, color=GREY, lw=0.8)
    axes.axvspan(0, _TAIL, color=GREY, alpha=0.15, lw=0)
    axes.set_xlim(0, 100)
    axes.set(xlabel="share of clients, worst first (%)", ylabel=metric)
    low = min(float(ranks.values.min()) for _, ranks in panels)
    high = max(float(ranks.values.max()) for _, ranks in panels)
    margin = 0.04 * (high - low) or 0.05
    axes.set_ylim(low - margin, high + margin)
    name_groups(figure, named, lines=True, markers=False)
    return figure


def _draw_quantiles(axes: Axes, ranks: Ranks, style: Mapping[str, Any]) -> None:
    """Draw a step for each client; many clients are drawn as quantiles."""
    num_ranks = len(ranks.mean)
    is_long = num_ranks > _MAX_STEPS
    places = np.linspace(0, num_ranks - 1, _MAX_STEPS) if is_long else np.arange(num_ranks)
    chosen = places.round().astype(int)
    edges = 100 * np.append(chosen, num_ranks) / num_ranks
    color, line = style["color"], style["ls"]
    if (ranks.low < ranks.high).any():
        low, high = ranks.low[chosen], ranks.high[chosen]
        axes.stairs(high, edges, baseline=low, fill=True, color=color, alpha=0.18, lw=0)
    axes.stairs(ranks.mean[chosen], edges, baseline=None, color=color, ls=line, lw=1.8)


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
