"""Robustness: results against the share of Byzantine clients."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from pl_fed.reports import configs
from pl_fed.reports.group import Final, Group, describe_restart, list_models, main_metric
from pl_fed.reports.labels import label_settings
from pl_fed.reports.picture import (
    GREY,
    WIDTH,
    Picture,
    apply_style,
    error_bars,
    line_style,
    round_numbers,
    shorten,
)
from pl_fed.reports.run import Run

_LEAST_SPAN = 0.1
_NAME_LENGTH = 62  # letters above a row of dots
_FEW_SHARES = 2  # more are drawn over an axis
_EXPECTED = "federation.adversary.expected"
_COUNTS = ("federation.adversary.fraction", "federation.adversary.ids", _EXPECTED)
_ATTACK = tuple(
    f"federation.adversary.{name}"
    for name in ("attack", "knowledge", "start_round", "stop_round", "redraw")
)


class Line(NamedTuple):
    """Groups that differ only in the share of Byzantine clients; a single group is a dot.

    Attributes:
        label: The name of the line.
        groups: The groups by their share of Byzantine clients, in ascending order.
    """

    label: str
    groups: dict[float, Group]


class _Points(NamedTuple):
    """Results of a line.

    Attributes:
        label: The name of the line.
        place: The place of its colour, from 0.
        finals: The results by share of Byzantine clients.
        has_other_clients: Whether a run lacks the results of its clients.
        has_diverged: Whether a share has no result, as the model of a client has diverged there.
    """

    label: str
    place: int
    finals: dict[float, Final]
    has_other_clients: bool
    has_diverged: bool


def draw_robustness(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield a picture for each model: its result against the share of Byzantine clients.

    A group without a comparable group at another share is a single dot. Without any Byzantine
    client there is no picture.
    """
    lines = build_lines(comparable_groups(groups))
    if not any(share for line in lines for share in line.groups):
        return
    metric = main_metric(groups, "test")
    for model in list_models(groups, "test"):
        measured = [_points(line, model, metric) for line in lines]
        curves = [points for points in measured if points.finals]
        if not curves:
            continue
        title = f"Robustness of {model} models"
        caption = (
            f"Test {metric} (mean over clients) against the share of Byzantine clients. The points"
            " of a line compare the same clients: those that are benign at each of its shares, for"
            " each seed."
        )
        if any(curve.has_other_clients for curve in curves):
            caption += " Runs without `per_client.csv` have the mean over their own benign clients."
        if any(points.has_diverged for points in measured):
            caption += " Shares at which the model of a client has diverged have no point."
        if any(len(line.groups) == 1 for line in lines):
            caption += " A single dot has no other run that differs only in its Byzantine clients."
        if any(value.std is not None for curve in curves for value in curve.finals.values()):
            caption += " Bars are the range over runs."
        alt = "; ".join(f"{curve.label}: {_describe(curve.finals)}" for curve in curves)
        yield Picture(
            f"robustness_{model}",
            title,
            caption,
            f"{title}, by share of Byzantine clients. {alt}.",
            [row for curve in curves for row in _rows(curve.label, curve.finals, metric)],
            _draw(curves, metric),
        )


def list_missing_groups(groups: Sequence[Group]) -> str:
    """Return the groups that the pictures do not show, with the reasons.

    The text is empty if no run has Byzantine clients.

    Args:
        groups: The groups of the report.
    """
    if not any(run.byzantine_share for group in groups for run in group.runs):
        return ""
    lines = build_lines(comparable_groups(groups))
    drawn = {run.folder for line in lines for group in line.groups.values() for run in group.runs}
    reasons: dict[str, list[str]] = {}
    for group in groups:
        if any(run.folder in drawn for run in group.runs):
            continue
        reasons.setdefault(_reason(group), []).append(group.title)
    return "; ".join(f"{', '.join(titles)} ({reason})" for reason, titles in reasons.items())


def comparable_groups(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with a config and test results."""
    return [group for group in groups if group.tested_runs and group.config]


def _reason(group: Group) -> str:
    """Return the reason why no picture of robustness shows a group."""
    if not group.tested_runs:
        return "no test results"
    if not group.config:
        return "no config"
    if group.tested_runs[0].byzantine_share is None:
        return "unknown share of Byzantine clients"
    return "no Byzantine client, and the results of another run without any"


def build_lines(groups: Sequence[Group]) -> list[Line]:
    """Combine groups that differ only in the share of Byzantine clients into lines.

    Groups without an attack are the start of the lines of all attacks on the same federation, or
    single dots if there are none. Groups that expect different numbers of Byzantine uploads at one
    share are separate lines.
    """
    members = _combine([item for group in groups if (item := _classify(group)) is not None])
    labels = label_settings(
        [
            {**items[-1].settings, **({} if expected is None else {_EXPECTED: expected})}
            for (_, _, expected), items in members.items()
        ]
    )
    return [
        Line(label + describe_restart(items[-1].group.runs[0]), _merge_by_share(items))
        for label, items in zip(labels, members.values())
    ]


class _Candidate(NamedTuple):
    """A group that may be a point of a line.

    Attributes:
        family: All settings but those of Byzantine clients, as text: equal within a line.
        attack: The settings of the attack, as text; empty if no client is Byzantine.
        share: The share of Byzantine clients.
        expected: The number of Byzantine uploads that the aggregator assumes, if it is set.
        settings: The settings of the family and the attack.
        group: The group.
    """

    family: str
    attack: str
    share: float
    expected: Any
    settings: dict[str, Any]
    group: Group


def _classify(group: Group) -> _Candidate | None:
    """Return a group as a candidate, or ``None`` if its share of Byzantine clients is unknown."""
    settings = configs.settings(group.config)
    attack = {key: settings.pop(key) for key in list(settings) if _is_within(key, _ATTACK)}
    expected = settings.get(_EXPECTED)
    settings = {key: value for key, value in settings.items() if not _is_within(key, _COUNTS)}
    run = group.tested_runs[0]
    share = run.byzantine_share
    if share is None:
        return None
    earlier = [(round, configs.identity(c)) for round, c in run.earlier_configs.items()]
    return _Candidate(
        family=str((sorted(settings.items()), earlier)),
        attack=str(sorted(attack.items())) if share else "",
        share=share,
        expected=expected,
        settings={**settings, **attack},
        group=group,
    )


def _combine(
    candidates: Sequence[_Candidate],
) -> dict[tuple[str, str, Any], list[_Candidate]]:
    """Return the members of each line by family, attack and expected number; clean groups first."""
    expectations: dict[tuple[str, str, float], set[Any]] = {}
    for item in candidates:
        expectations.setdefault((item.family, item.attack, item.share), set()).add(item.expected)
    ambiguous = {key[:2] for key, numbers in expectations.items() if len(numbers) > 1}
    attacked: dict[tuple[str, str, Any], list[_Candidate]] = {}
    for item in candidates:
        if item.share:
            expected = item.expected if (item.family, item.attack) in ambiguous else None
            attacked.setdefault((item.family, item.attack, expected), []).append(item)
    clean = {key: _clean_candidates(candidates, key[0], key[2]) for key in attacked}
    members = {key: [*clean[key], *items] for key, items in attacked.items()}
    drawn = {id(item) for items in clean.values() for item in items}
    for item in candidates:
        if not item.share and id(item) not in drawn:
            members.setdefault((item.family, "", item.expected), []).append(item)
    return members


def _clean_candidates(
    candidates: Sequence[_Candidate], family: str, expected: Any
) -> list[_Candidate]:
    """Return the groups of a family without Byzantine clients.

    If some of them expect as many Byzantine uploads as the line does, only those are returned.
    """
    clean = [item for item in candidates if item.family == family and not item.share]
    if expected is None:
        return clean
    return [item for item in clean if item.expected == expected] or clean


def _merge_by_share(candidates: Sequence[_Candidate]) -> dict[float, Group]:
    """Return one group for each share of Byzantine clients, with the runs of all its candidates.

    Without Byzantine clients, a run with an attack equals a run without one. Such runs with the
    same seed and the same test results count once.
    """
    ordered = sorted(candidates, key=lambda item: item.share)
    merged = {}
    for share, items in groupby(ordered, key=lambda item: item.share):
        groups = [item.group for item in items]
        runs = [run for group in groups for run in group.runs]
        if not share:
            runs = list({_outcome(run): run for run in reversed(runs)}.values())[::-1]
        merged[share] = replace(groups[0], runs=tuple(runs))
    return merged


def _outcome(run: Run) -> tuple[Any, ...]:
    """Return the seeds and the test results of a run."""
    tests = sorted(name for name in run.metrics if name.startswith("test/"))
    return configs.describe_seeds(run.config), *((name, run.final(name)) for name in tests)


def _is_within(key: str, names: Sequence[str]) -> bool:
    """Return whether a key is one of some names or lies below one."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _points(line: Line, model: str, metric: str) -> _Points:
    """Return the results of a line, over the clients that are benign at each of its shares."""
    runs = [run for group in line.groups.values() for run in group.tested_runs]
    common = _common_clients(runs)
    column, name = f"{model}_{metric}", f"test/{model}/{metric}"

    def read(run: Run) -> float | None:
        """Return a run's mean over the common clients; over its own ones without their results."""
        value = _mean_over(run, model, metric, common.get(_clients_key(run)))
        return run.final(name) if value is None else value

    finals = {share: group.summarize(read) for share, group in line.groups.items()}
    known_finals = {s: final for s, final in finals.items() if final and np.isfinite(final.mean)}
    has_diverged = any(final and not np.isfinite(final.mean) for final in finals.values())
    place = [group.number for group in line.groups.values()][-1] - 1
    has_other_clients = len(known_finals) > 1 and any(column not in run.clients for run in runs)
    return _Points(line.label, place, known_finals, has_other_clients, has_diverged)


def _common_clients(runs: Sequence[Run]) -> dict[tuple[str, int], NDArray[np.bool_]]:
    """Return the clients that are benign in each run of a seed, bool [clients], by that seed."""
    masks: dict[tuple[str, int], NDArray[np.bool_]] = {}
    for run in runs:
        key = _clients_key(run)
        masks[key] = masks.get(key, np.ones(len(run.benign), dtype=bool)) & run.benign
    return masks


def _clients_key(run: Run) -> tuple[str, int]:
    """Return the key of runs with the same clients: their seeds and number of clients."""
    return configs.describe_seeds(run.config), len(run.benign)


def _mean_over(
    run: Run, model: str, metric: str, clients: NDArray[np.bool_] | None
) -> float | None:
    """Return the mean of a test metric over some clients; NaN or infinite if one has diverged."""
    column = f"{model}_{metric}"
    if clients is None or column not in run.clients:
        return None
    values = run.clients[column][clients & run.mark_results(model, metric)]
    return float(values.mean()) if len(values) else None


@apply_style
def _draw(curves: Sequence[_Points], metric: str) -> Figure:
    """Draw a line for each attack over three shares or more; otherwise dots in a row."""
    if any(len(curve.finals) > _FEW_SHARES for curve in curves):
        return _draw_lines(curves, metric)
    return _draw_dots(curves, metric)


def _draw_lines(curves: Sequence[_Points], metric: str) -> Figure:
    figure = Figure(figsize=(WIDTH, 2.8 + 0.19 * len(curves)), layout="constrained")
    axes = figure.subplots()
    for curve in curves:
        means = [value.mean for value in curve.finals.values()]
        bars = error_bars(curve.finals.values())
        axes.errorbar(
            list(curve.finals), means, bars if any(map(any, bars)) else None, lw=1.8, ms=5,
            elinewidth=0.8, capsize=2, label=shorten(curve.label, 60), **line_style(curve.place),
        )  # fmt: skip
    axes.set(xlabel="share of Byzantine clients", ylabel=f"mean test {metric}")
    figure.legend(loc="outside lower center", ncols=1, handlelength=3)
    return figure


def _draw_dots(curves: Sequence[_Points], metric: str) -> Figure:
    """Draw a row for each federation: filled dots without Byzantine clients, hollow dots with."""
    figure = Figure(figsize=(WIDTH, 0.9 + 0.44 * len(curves)), layout="constrained")
    axes = figure.subplots()
    for row, curve in enumerate(curves):
        color = line_style(curve.place)["color"]
        axes.plot(
            [value.mean for value in curve.finals.values()], [row] * len(curve.finals),
            color=color, lw=1.2,
        )  # fmt: skip
        for share, value in curve.finals.items():
            axes.plot([value.low, value.high], [row, row], color=color, lw=3, alpha=0.3)
            axes.plot(
                [value.mean], [row], "o", ms=6, color=color,
                markerfacecolor="none" if share else color,
            )  # fmt: skip
        shares = [f"{share:.3g}" for share in curve.finals if share]
        share_text = f" (share {', '.join(shares)})" if shares else ""
        label = shorten(curve.label, _NAME_LENGTH - len(share_text)) + share_text
        axes.annotate(label, (0.01, row - 0.22), xycoords=("axes fraction", "data"), fontsize=8)
    axes.set_yticks([])
    axes.set_ylim(len(curves) - 0.6, -0.75)
    axes.margins(x=0.06)
    low, high = axes.get_xlim()
    if metric == "accuracy" and high - low < _LEAST_SPAN:  # small differences look small
        axes.set_xlim(*((low + high + sign * _LEAST_SPAN) / 2 for sign in (-1, 1)))
    axes.set(xlabel=f"mean test {metric}")
    handles = [
        Line2D([], [], ls="none", marker="o", ms=6, color=GREY, markerfacecolor=fill)
        for fill in (GREY, "none")
    ]
    axes.legend(
        handles, ["no Byzantine client", "attacked"], loc="lower left", bbox_to_anchor=(0, 1),
        ncols=2, borderaxespad=0,
    )  # fmt: skip
    return figure


def _describe(points: dict[float, Final]) -> str:
    return ", ".join(f"{value.mean:.4g} at {share:g}" for share, value in points.items())


def _rows(label: str, points: dict[float, Final], metric: str) -> Iterator[dict[str, Any]]:
    for share, value in points.items():
        yield round_numbers(
            {
                "label": label,
                "byzantine": share,
                metric: value.mean,
                "min": value.low,
                "max": value.high,
                "runs": value.runs,
            }
        )
