"""Unequal clients: results over simulated time, and the clients that are left out."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pl_fed.functional.rank_correlation import rank_correlation
from pl_fed.reports.comparisons import main_model
from pl_fed.reports.group import Curve, Group, is_lower_better, list_models, main_metric
from pl_fed.reports.picture import (
    Picture,
    apply_style,
    line_style,
    make_panels,
    name_groups,
    round_numbers,
)
from pl_fed.reports.run import Run

_CLOCK = "systems/seconds"


def has_clock(group: Group) -> bool:
    """Return whether a group ran on a simulated clock (``federation.systems``)."""
    return bool(group.curve(_CLOCK).rounds)


def read_clock(group: Group) -> dict[int, float]:
    """Return the simulated seconds at the end of each round; the mean over the seeds."""
    curve = group.curve(_CLOCK)
    return dict(zip(curve.rounds, curve.mean))


def _read_timed_curve(group: Group, name: str) -> tuple[Curve, list[float]]:
    """Return a metric over the rounds with a simulated time, and these times.

    An evaluation after the last round has none.
    """
    curve, clock = group.curve(name), read_clock(group)
    timed = [place for place, round in enumerate(curve.rounds) if round in clock]
    chosen = Curve(
        rounds=[curve.rounds[place] for place in timed],
        mean=[curve.mean[place] for place in timed],
        low=[curve.low[place] for place in timed],
        high=[curve.high[place] for place in timed],
        runs=[curve.runs[place] for place in timed],
    )
    return chosen, [clock[round] for round in chosen.rounds]


def measure_participation(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Yield the participation of each group's benign clients, if any group has a clock.

    Numbers are means over the seeds. Jain's index of the clients' rounds is 1 if all took part
    equally often.
    """
    if not any(map(has_clock, groups)):
        return
    metric = main_metric(groups, "test")
    for group in groups:
        model = main_model(group)
        runs = group.first_of_seeds(run for run in group.tested_runs if "rounds" in run.clients)
        if not runs:
            continue
        sign = -1 if is_lower_better(group.runs, metric) else 1
        results = [_measure(run, f"{model}_{metric}", sign) for run in runs]
        yield {
            "group": group.number,
            "name": group.label,
            "model": model,
            **{name: _mean([result[name] for result in results]) for name in results[0]},
            "lowest rounds in all seeds": _count_always_low(runs),
        }


def _measure(run: Run, column: str, sign: int) -> dict[str, float]:
    """Return the participation of a run's benign clients, and its correlation with a result."""
    rounds = run.clients["rounds"][run.benign]
    total = float((rounds**2).sum())
    results = run.clients.get(column, np.full(len(run.benign), np.nan))[run.benign]
    valid = np.isfinite(results)
    return {
        "rounds per client": float(rounds.mean()),
        "least": float(rounds.min()),
        "most": float(rounds.max()),
        "never": float((rounds == 0).sum()),
        "Jain's index": float(rounds.sum() ** 2 / (len(rounds) * total)) if total else np.nan,
        "correlation with the result": sign * rank_correlation(rounds[valid], results[valid]),
    }


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean of the defined values, or ``None`` without any."""
    defined = [value for value in values if np.isfinite(value)]
    return float(np.mean(defined)) if defined else None


def _count_always_low(runs: Sequence[Run]) -> int | None:
    """Return the number of benign clients in the lowest quarter of rounds in every seed.

    ``None`` for a single seed, or seeds with different numbers of clients.
    """
    if len(runs) < 2 or len({len(run.benign) for run in runs}) > 1:
        return None
    low: list[NDArray[np.bool_]] = []
    for run in runs:
        rounds = run.clients["rounds"]
        low.append(run.benign & (rounds <= np.quantile(rounds[run.benign], 0.25)))
    return int(np.logical_and.reduce(low).sum())


def draw_simulated_time(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield a picture for each model: its main metric over simulated time."""
    metric = main_metric(groups, "val")
    for model in list_models(groups, "val"):
        name = f"val/{model}/{metric}"
        drawn = [group for group in groups if _read_timed_curve(group, name)[1]]
        if not drawn:
            continue
        title = f"Validation of {model} models over simulated time"
        caption = (
            "Mean over benign clients after each validated round, at the simulated time of the"
            " round's end (`federation.systems`)."
        )
        if any(len(group.runs) > 1 for group in drawn):
            caption += " Lines are means over the seeds of metric and time; bands are their range."
        rows = [row for group in drawn for row in _list_points(group, name)]
        ends = (
            f"{group.title}: {curve.mean[-1]:.4g} after {seconds[-1]:.4g} s"
            for group in drawn
            for curve, seconds in [_read_timed_curve(group, name)]
        )
        alt = f"{title}. {'; '.join(ends)}."
        figure = _draw(drawn, name, metric, drawn if len(groups) > 1 else [])
        yield Picture(f"time_{model}", title, caption, alt, rows, figure)


def _list_points(group: Group, name: str) -> Iterator[dict[str, Any]]:
    """Yield the points of a curve over simulated time."""
    curve, times = _read_timed_curve(group, name)
    points = zip(curve.rounds, times, curve.mean, curve.low, curve.high)
    for round, seconds, mean, low, high in points:
        yield round_numbers(
            {
                "group": group.number,
                "label": group.label,
                "round": round,
                "seconds": seconds,
                "mean": mean,
                "min": low,
                "max": high,
            }
        )


@apply_style
def _draw(drawn: Sequence[Group], name: str, metric: str, named: Sequence[Group]) -> Figure:
    figure, (axes,) = make_panels(1, 2.9, named)
    for group in drawn:
        (curve, seconds), style = _read_timed_curve(group, name), line_style(group.number - 1)
        axes.plot(seconds, curve.mean, lw=1.8, ms=4, markevery=max(1, len(seconds) // 8), **style)
        if max(curve.runs) > 1:
            axes.fill_between(
                seconds, curve.low, curve.high, color=style["color"], alpha=0.18, lw=0
            )
    axes.set_xlim(left=0)
    axes.set(xlabel="simulated seconds", ylabel=metric)
    name_groups(figure, named, lines=True)
    return figure
