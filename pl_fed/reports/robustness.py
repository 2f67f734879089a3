"""What byzantine clients cost: results against their share."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from pl_fed.reports import configs
from pl_fed.reports.group import Final, Group, changed, measure_of, models_of
from pl_fed.reports.labels import labels_of
from pl_fed.reports.picture import Picture, bars, look, round_numbers, short, styled
from pl_fed.reports.run import Run

_EXPECTED = "federation.adversary.expected"
_COUNTS = ("federation.adversary.fraction", "federation.adversary.ids", _EXPECTED)
_ATTACK = tuple(
    f"federation.adversary.{name}" for name in ("attack", "knowledge", "start_round", "redraw")
)


class Line(NamedTuple):
    """Groups that differ in the share of byzantine clients alone, by that share."""

    label: str
    groups: dict[float, Group]


def against_fraction(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield a picture for each model: its result against the share of byzantine clients.

    Groups with one share only are single points. Without any line of several shares there is no
    picture.
    """
    lines = lines_of(_comparable(groups))
    measure = measure_of(groups, "test")
    for model in models_of(groups, "test"):
        metric = f"test/{model}/{measure}"
        found = [(line.label, points) for line in lines if (points := _values(line, metric))]
        if all(len(points) < 2 for _, points in found):
            continue
        title = f"Robustness of {model} models"
        caption = f"Test {measure} of benign clients (mean) against the share of byzantine clients."
        if any(len(points) == 1 for _, points in found):
            caption += " A single point is of runs at one share only."
        if any(value.std is not None for _, points in found for value in points.values()):
            caption += " Bars are the range over runs."
        said = "; ".join(f"{label}: {_said(points)}" for label, points in found)
        yield Picture(
            f"robustness_{model}",
            title,
            caption,
            f"{title}, by share of byzantine clients. {said}.",
            [row for label, points in found for row in _rows(label, points, measure)],
            _drawn(found, measure),
        )


def left_out(groups: Sequence[Group]) -> str:
    """Return the groups that the pictures do not show, with the reasons; empty without an attack.

    Args:
        groups: The groups of the report.
    """
    shares = {group.number: [run.byzantine_share for run in group.runs] for group in groups}
    if not any(share for own in shares.values() for share in own):
        return ""
    lines = lines_of(_comparable(groups))
    several = any(len(line.groups) > 1 for line in lines)
    numbers = {run.folder for line in lines for group in line.groups.values() for run in group.runs}
    reasons: dict[str, list[str]] = {}
    for group in groups:
        if several and any(run.folder in numbers for run in group.runs):
            continue
        reasons.setdefault(_reason(group), []).append(group.title)
    return "; ".join(f"{', '.join(titles)} ({reason})" for reason, titles in reasons.items())


def _comparable(groups: Sequence[Group]) -> list[Group]:
    return [group for group in groups if group.tested and group.config]


def _reason(group: Group) -> str:
    """Return why a group is in no picture of robustness."""
    if not group.tested:
        return "without a test"
    if not group.config:
        return "without a config"
    if group.tested[0].byzantine_share is None:
        return "its share of byzantine clients is unknown"
    return "no other run differs from it in byzantine clients alone"


def lines_of(groups: Sequence[Group]) -> list[Line]:
    """Put groups together that differ in the share of byzantine clients alone.

    Groups without an attack begin the lines of all attacks on the same federation.
    """
    found = [each for group in groups if (each := _placed(group)) is not None]
    expecting: dict[tuple[str, str, float], set[Any]] = {}
    for one in found:
        expecting.setdefault((one.family, one.attack, one.share), set()).add(one.expected)
    several = {key[:2] for key, numbers in expecting.items() if len(numbers) > 1}
    lines: dict[tuple[str, str, Any], list[_Placed]] = {}
    for one in found:
        if one.share:
            told = one.expected if (one.family, one.attack) in several else None
            lines.setdefault((one.family, one.attack, told), []).append(one)
    names = labels_of(
        [
            {**own[0].settings, **({} if told is None else {_EXPECTED: told})}
            for (_, _, told), own in lines.items()
        ]
    )
    return [
        Line(name + changed(own[0].group.runs[0]), _joined(_begun(found, key), own))
        for name, (key, own) in zip(names, lines.items())
    ]


class _Placed(NamedTuple):
    """A group, and what tells it from others: all but the number of byzantine clients."""

    family: str
    attack: str
    share: float
    expected: Any
    settings: dict[str, Any]
    group: Group


def _placed(group: Group) -> _Placed | None:
    settings = configs.settings(group.config)
    attack = {k: settings.pop(k) for k in list(settings) if _is_of(k, _ATTACK)}
    expected = settings.get(_EXPECTED)
    settings = {k: v for k, v in settings.items() if not _is_of(k, _COUNTS)}
    run = group.tested[0]
    share = run.byzantine_share
    if share is None:
        return None
    earlier = [(round, configs.identity(each)) for round, each in run.earlier.items()]
    family, how = str((sorted(settings.items()), earlier)), str(sorted(attack.items()))
    return _Placed(family, how if share else "", share, expected, {**settings, **attack}, group)


def _begun(found: Sequence[_Placed], key: tuple[str, str, Any]) -> list[_Placed]:
    """Return a line's groups without an attack: those that expect as many attackers, if any do."""
    family, _, told = key
    clean = [one for one in found if one.family == family and not one.share]
    return [one for one in clean if told is not None and one.expected == told] or clean


def _joined(*parts: Sequence[_Placed]) -> dict[float, Group]:
    """Return groups by share; several at a share become one of all their runs.

    Without byzantine clients runs with and without an attack are the same: those of one seed that
    came to the same end count once.
    """
    ordered = sorted((one for part in parts for one in part), key=lambda one: one.share)
    found = {}
    for share, own in groupby(ordered, key=lambda one: one.share):
        same = [one.group for one in own]
        runs = [run for group in same for run in group.runs]
        if not share:
            runs = list({_end(run): run for run in reversed(runs)}.values())[::-1]
        found[share] = replace(same[0], runs=tuple(runs))
    return found


def _end(run: Run) -> tuple[Any, ...]:
    """Return what is the same of runs that are the same."""
    tests = sorted(name for name in run.metrics if name.startswith("test/"))
    return configs.seed(run.config), *((name, run.final(name)) for name in tests)


def _is_of(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _values(line: Line, metric: str) -> dict[float, Final]:
    found = {share: group.final(metric) for share, group in line.groups.items()}
    return {share: value for share, value in found.items() if value is not None}


@styled
def _drawn(found: Sequence[tuple[str, dict[float, Final]]], measure: str) -> Figure:
    figure = Figure(figsize=(6.4, 3.0 + 0.19 * len(found)), layout="constrained")
    axes = figure.subplots()
    for place, (label, values) in enumerate(found):
        style = look(place)
        means = [value.mean for value in values.values()]
        reach = bars(values.values())
        axes.errorbar(
            list(values), means, reach if any(map(any, reach)) else None,
            lw=1.4, ms=5, elinewidth=0.8, capsize=2, label=short(label, 80), **style,
        )  # fmt: skip
    axes.set(xlabel="share of byzantine clients", ylabel=f"mean test {measure}")
    if measure == "accuracy":
        axes.set_ylim(-0.02, 1.02)
    figure.legend(loc="outside lower center", ncols=1, handlelength=3)
    return figure


def _said(values: dict[float, Final]) -> str:
    return ", ".join(f"{value.mean:.4g} at {share:g}" for share, value in values.items())


def _rows(label: str, values: dict[float, Final], measure: str) -> Iterator[dict[str, Any]]:
    for share, value in values.items():
        yield round_numbers(
            {
                "label": label,
                "byzantine": share,
                measure: value.mean,
                "min": value.low,
                "max": value.high,
                "runs": value.runs,
            }
        )
