"""Curves over rounds: accuracy and loss on validation data, and the training loss."""

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator

from pl_fed.reports.group import Curve, Group, measure_of, models_of, with_metric
from pl_fed.reports.picture import (
    Picture,
    draw_curves,
    fit_scale,
    name_groups,
    number_ends,
    round_numbers,
    sheet,
    styled,
)

_UPLOADS = ("forged", "clipped", "dropped", "rejected")


def validation(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield a picture for each model: its main metric and its loss over rounds."""
    for model in models_of(groups, "val"):
        measures = dict.fromkeys((measure_of(groups, "val"), "accuracy", "loss"))
        metrics = {f"val/{model}/{measure}": measure for measure in measures}
        yield from _picture(
            groups,
            metrics,
            f"curves_{model}",
            f"Validation of {model} models",
            "Mean over benign clients, after each round that was validated.",
        )


def training(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield the picture of the training loss."""
    caption = "The algorithm's objective: mean over local steps and the cohort's benign clients."
    metrics = {"train/loss": "training loss"}
    yield from _picture(groups, metrics, "train_loss", "Training loss", caption)


def uploads(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield the picture of what became of uploads, if anything did."""
    names = {f"train/{name}": f"uploads\n{name}" for name in _UPLOADS}
    some = {n: what for n, what in names.items() if any(any(g.curve(n).high) for g in groups)}
    caption = "How many uploads of a round an attack forged, a defence clipped or dropped, or the"
    caption += " server rejected as broken. What is not drawn was always 0."
    yield from _picture(groups, some, "uploads", "What became of uploads", caption)


@styled
def _drawn(groups: Sequence[Group], metrics: dict[str, str], named: Sequence[Group]) -> Any:
    figure, panels = sheet(len(metrics), 2.3 if len(groups) < 16 else 3.2, named)
    for axes, (metric, what) in zip(panels, metrics.items()):
        counts = what.startswith("uploads")
        found = {group.number: group.curve(metric) for group in groups}
        drawn = {number: each for number, each in found.items() if _is_drawn(each, counts)}
        draw_curves(axes, drawn)
        axes.set_ylabel(what)
        if what == "accuracy":
            axes.set_ylim(-0.02, 1.02)
        elif counts:
            axes.set_ylim(0, 1.08 * max(max(curve.high) for curve in drawn.values()))
        else:
            fit_scale(axes, (value for curve in drawn.values() for value in curve.mean))
        number_ends(axes, drawn)
    panels[-1].set_xlabel("round")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    name_groups(figure, named, lines=True)
    return figure


def _picture(
    groups: Sequence[Group], metrics: dict[str, str], name: str, title: str, caption: str
) -> Iterator[Picture]:
    counts = name == "uploads"
    shown = [g for g in groups if any(_is_drawn(g.curve(metric), counts) for metric in metrics)]
    metrics = {m: what for m, what in metrics.items() if any(with_metric(shown, m))}
    if not shown or not metrics:
        return
    if any(len(group.runs) > 1 for group in shown):
        caption += " Lines are means over the runs that went on to a round, bands their range."
    ends = (f"{group.title} {_ends(group, metrics)}" for group in shown)
    alt = f"{title}, over rounds. In the end: {'; '.join(ends)}."
    rows = [row for group in shown for metric in metrics for row in _rows(group, metric)]
    named = shown if len(groups) > 1 else []
    yield Picture(name, title, caption, alt, rows, _drawn(shown, metrics, named))


def _is_drawn(curve: Curve, counts: bool) -> bool:
    """Whether there is something to draw: a count that is always 0 is not."""
    return any(curve.high) if counts else bool(curve.rounds)


def _ends(group: Group, metrics: dict[str, str]) -> str:
    ends = {what: group.curve(metric).mean[-1:] for metric, what in metrics.items()}
    return ", ".join(f"{' '.join(what.split())} {end[0]:.4g}" for what, end in ends.items() if end)


def _rows(group: Group, metric: str) -> Iterator[dict[str, Any]]:
    for round, mean, low, high, runs in zip(*group.curve(metric)):
        yield round_numbers(
            {
                "group": group.number,
                "label": group.label,
                "metric": metric,
                "round": round,
                "mean": mean,
                "min": low,
                "max": high,
                "runs": runs,
            }
        )
