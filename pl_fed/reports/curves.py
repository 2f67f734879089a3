"""Curves over rounds: accuracy and loss on validation data, and the training loss."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from matplotlib.ticker import MaxNLocator

from pl_fed.reports.group import Curve, Group, groups_with_metric, list_models, main_metric
from pl_fed.reports.picture import (
    ColumnTable,
    Picture,
    apply_style,
    describe_equal_lines,
    draw_curves,
    fit_scale,
    make_panels,
    name_groups,
    number_ends,
)
from pl_fed.reports.run import CENTRAL

_UPLOADS = ("forged", "clipped", "dropped", "rejected")


def draw_validation(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield a picture for each model: its main metric, accuracy and loss over rounds."""
    for model in list_models(groups, "val"):
        names = dict.fromkeys((main_metric(groups, "val"), "accuracy", "loss"))
        metrics = {f"val/{model}/{name}": name for name in names}
        yield from _picture(
            groups,
            metrics,
            f"curves_{model}",
            f"Validation of {model} models",
            "Mean over benign clients after each validated round.",
        )
    names = dict.fromkeys((main_metric(groups, "val"), "accuracy", "loss"))
    yield from _picture(
        groups,
        {f"val/{CENTRAL}/{name}": name for name in names},
        f"curves_{CENTRAL}",
        "Validation of global models on the server's samples",
        "Over all of these samples after each validated round.",
    )


def draw_training_loss(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield the picture of the training loss, if any run has one."""
    caption = "Mean of the algorithm's objective over local steps and the cohort's benign clients."
    metrics = {"train/loss": "training loss"}
    yield from _picture(groups, metrics, "train_loss", "Training loss", caption)


def draw_uploads(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield the picture of forged, clipped, dropped and rejected uploads, if there are any."""
    titles = {f"train/{name}": f"uploads\n{name}" for name in _UPLOADS}
    metrics = {
        metric: title
        for metric, title in titles.items()
        if any(any(group.curve(metric).high) for group in groups)
    }
    caption = "Uploads per round that an attack forged, a defence clipped or dropped, or the server"
    caption += " rejected as broken. Counts that were always 0 are not drawn."
    yield from _picture(groups, metrics, "uploads", "Outcome of uploads", caption)


def draw_privacy(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield the picture of the privacy budget, if any run has one."""
    metrics = {
        "privacy/epsilon": "ε",
        "privacy/simulated_epsilon": "ε of a simulated\nlarger cohort",
        "privacy/clip_norm": "clipping norm",
    }
    caption = "The privacy budget ε that is spent after each round, at the config's δ, and the"
    caption += " clipping norm. ε of a simulated larger cohort is no guarantee of the run itself."
    if any(group.curve(metric).rounds for group in groups for metric in [*metrics][:2]):
        yield from _picture(groups, metrics, "privacy", "Privacy budget", caption)


@apply_style
def _draw(groups: Sequence[Group], metrics: dict[str, str], named: Sequence[Group]) -> Any:
    figure, panels = make_panels(len(metrics), 2.3 if len(groups) < 16 else 3.2, named)
    for axes, (metric, title) in zip(panels, metrics.items()):
        is_count = title.startswith("uploads")
        curves = {group.number: group.curve(metric) for group in groups}
        curves = {n: curve for n, curve in curves.items() if _is_visible(curve, is_count)}
        draw_curves(axes, curves)
        axes.set_ylabel(title)
        if is_count:
            axes.set_ylim(0, 1.08 * max(max(curve.high) for curve in curves.values()))
        elif title != "accuracy":
            fit_scale(axes, (value for curve in curves.values() for value in curve.mean))
        number_ends(axes, curves)
    panels[-1].set_xlabel("round")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    name_groups(figure, named, lines=True)
    return figure


def _picture(
    groups: Sequence[Group], metrics: dict[str, str], name: str, title: str, caption: str
) -> Iterator[Picture]:
    is_count = name == "uploads"
    drawn = [g for g in groups if any(_is_visible(g.curve(metric), is_count) for metric in metrics)]
    metrics = {m: label for m, label in metrics.items() if any(groups_with_metric(drawn, m))}
    if not drawn or not metrics:
        return
    if any(len(group.runs) > 1 for group in drawn):
        caption += " Lines are means over the runs that reached a round; bands are their range."
    ends = (f"{group.title} {_describe_ends(group, metrics)}" for group in drawn)
    alt = f"{title}, over rounds. Last values: {'; '.join(ends)}."
    rows = _join_tables(_list_points(group, metric) for group in drawn for metric in metrics)
    named = drawn if len(groups) > 1 else []
    first = next(iter(metrics))
    note = describe_equal_lines({group.number: group.curve(first).mean for group in drawn})
    figure = _draw(drawn, metrics, named)
    yield Picture(name, title, caption, alt, rows, figure, "" if is_count else note)


def _is_visible(curve: Curve, is_count: bool) -> bool:
    """Return whether a curve has values; a count must differ from 0 in some round."""
    return any(curve.high) if is_count else bool(curve.rounds)


def _describe_ends(group: Group, metrics: dict[str, str]) -> str:
    ends = {title: group.curve(metric).mean[-1:] for metric, title in metrics.items()}
    return ", ".join(
        f"{' '.join(title.split())} {end[0]:.4g}" for title, end in ends.items() if end
    )


def _list_points(group: Group, metric: str) -> dict[str, list[Any]]:
    """Return the points of a curve by column."""
    curve = group.curve(metric)
    number = len(curve.rounds)
    mean = _round_all(curve.mean)
    return {
        "group": [group.number] * number,
        "label": [group.label] * number,
        "metric": [metric] * number,
        "round": curve.rounds,
        "mean": mean,
        "min": mean if curve.low is curve.mean else _round_all(curve.low),
        "max": mean if curve.high is curve.mean else _round_all(curve.high),
        "runs": curve.runs,
    }


def _round_all(values: Iterable[float]) -> list[float]:
    """Return numbers rounded as by :func:`round_number`, without a call for each."""
    return [float(f"{value:.6g}") for value in values]


def _join_tables(tables: Iterable[dict[str, list[Any]]]) -> ColumnTable:
    """Return the rows of tables with equal columns, one table after the other.

    Columns that are one list in each table are one list in the result.
    """
    parts = list(tables)
    places = {name: tuple(id(part[name]) for part in parts) for name in parts[0]}
    joined = {
        place: [*chain.from_iterable(part[name] for part in parts)]
        for place, name in {place: name for name, place in places.items()}.items()
    }
    return ColumnTable({name: joined[place] for name, place in places.items()})
