"""Plans of a study beyond its cells: its tuning and its comparisons."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pl_fed.studies.axes import Axis, list_shared
from pl_fed.studies.changes import check_path
from pl_fed.studies.metrics import read_metric
from pl_fed.studies.readers import (
    StudyError,
    read_integer,
    read_list,
    read_mapping,
    refuse,
)
from pl_fed.studies.selection import Selection, read_selection

SAMPLERS = ("grid", "random", "tpe")
ALL = "all"
"""The key of a search space that holds for each label of the tuned axis."""
_SCALES = ("linear", "log", "int")


@dataclass(frozen=True)
class Interval:
    """Interval: the values that tuning may give an argument.

    Attributes:
        low: The smallest value.
        high: The largest value.
        scale: ``linear``, ``log`` (uniform in the logarithm) or ``int`` (integers).
    """

    low: float
    high: float
    scale: str = "linear"


@dataclass(frozen=True)
class Choices:
    """Choices: a list of values that tuning may give an argument.

    Attributes:
        values: The values.
    """

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Tuning:
    """Tuning: the search for values of arguments, with the same budget for each label of an axis.

    Attributes:
        per: The axis with a choice for each label, usually ``algorithm``.
        on: The values of other axes that trials use.
        budget: The number of trials for each label, at least 1.
        sampler: ``grid``, ``random`` or ``tpe``.
        space: The searched values for each label, or for ``all``, by the paths of arguments.
        metric: The validation metric that chooses.
        seeds: The number of runs of a trial, at least 1.
        maximizes: Whether larger values of the metric are better; ``None`` if the file does not
            tell.
    """

    per: str
    on: Selection
    budget: int
    sampler: str
    space: Mapping[str, Mapping[str, Interval | Choices]]
    metric: str
    seeds: int = 1
    maximizes: bool | None = None


def find_space(plan: Tuning, label: str) -> dict[str, Interval | Choices]:
    """Return the searched values of a label: those of ``all`` and its own, which win."""
    return {**plan.space.get(ALL, {}), **plan.space.get(label, {})}


@dataclass(frozen=True)
class Comparison:
    """Comparison: the tests that the report of a study makes.

    Attributes:
        metrics: The names of metrics in the table of results.
        baseline: The values that the others are compared with; none compares all pairs.
        directions: Whether larger values are better, of the metrics of which the file tells it.
    """

    metrics: tuple[str, ...]
    baseline: Selection = field(default_factory=Selection)
    directions: Mapping[str, bool] = field(default_factory=dict)


def read_tuning(value: Any, axes: tuple[Axis, ...]) -> Tuning | None:
    """Return the tuning that a study file describes; ``None`` without one.

    Raises:
        StudyError: If the value describes none.
    """
    if value is None:
        return None
    keys = ("per", "on", "budget", "sampler", "space", "metric", "seeds")
    plan = read_mapping("tune", value, keys)
    labels = {axis.name: axis.labels for axis in axes}
    per = plan.get("per")
    if per not in labels:
        refuse("tune.per", f"be one of the axes {', '.join(labels) or '(there is none)'}", per)
    sampler = plan.get("sampler", "tpe")
    if sampler not in SAMPLERS:
        refuse("tune.sampler", f"be one of {', '.join(SAMPLERS)}", sampler)
    metric, maximizes = read_metric("tune.metric", plan.get("metric"))
    if not metric.startswith("val/"):
        refuse("tune.metric", "be a metric of the validation, such as val/global/loss", metric)
    space = _read_space(plan.get("space"), labels[str(per)], sampler == "grid")
    _check_axes(space, [axis for axis in axes if axis.name != per])
    return Tuning(
        per=str(per),
        on=read_selection("tune.on", plan.get("on", {}), axes),
        budget=read_integer("tune.budget", plan.get("budget"), 1),
        sampler=str(sampler),
        space=space,
        metric=metric,
        seeds=read_integer("tune.seeds", plan.get("seeds", 1), 1),
        maximizes=maximizes,
    )


def _check_axes(space: Mapping[str, Mapping[str, Any]], axes: Sequence[Axis]) -> None:
    """Refuse to tune an argument that an axis sets: the tuned value would undo the axis."""
    for axis in axes:
        for change in axis.changes.values():
            for label, values in space.items():
                for argument in list_shared(values, change.overrides):
                    raise StudyError(
                        f"Expected argument `tune.space.{label}` to leave the arguments of other"
                        f" axes alone but got {argument}, which the axis {axis.name} sets: remove"
                        " it there or here."
                    )


def _read_space(
    value: Any, labels: tuple[str, ...], is_grid: bool
) -> dict[str, dict[str, Interval | Choices]]:
    space = read_mapping("tune.space", value, (*labels, ALL))
    if not space:
        refuse("tune.space", "have at least one label with arguments", value)
    return {
        label: {
            path: _read_range(f"tune.space.{label}.{path}", path, item, is_grid)
            for path, item in read_mapping(f"tune.space.{label}", arguments).items()
        }
        for label, arguments in space.items()
    }


def _read_range(path: str, argument: str, value: Any, is_grid: bool) -> Interval | Choices:
    """Return ``[low, high]`` or ``[low, high, scale]`` as an interval, another list as choices.

    In a grid, ``[low, high]`` are two choices.
    """
    check_path(path, argument)
    values = read_list(path, value)
    scale = values[2] if len(values) == 3 and values[2] in _SCALES else None
    bounds = values[:2] if scale else values
    are_numbers = all(
        isinstance(bound, int | float) and not isinstance(bound, bool) for bound in bounds
    )
    if len(bounds) != 2 or not are_numbers or (is_grid and scale is None):
        return Choices(tuple(values))
    low, high = bounds
    if low >= high or (scale == "log" and low <= 0):
        needs = "have bounds 0 < low < high" if scale == "log" else "have bounds low < high"
        refuse(path, needs, values)
    return Interval(float(low), float(high), scale or "linear")


def read_comparison(value: Any, axes: tuple[Axis, ...]) -> Comparison | None:
    """Return the comparison that a study file describes; ``None`` without one.

    Raises:
        StudyError: If the value describes none.
    """
    if value is None:
        return None
    plan = read_mapping("compare", value, ("metrics", "baseline"))
    directions: dict[str, bool | None] = {}
    for item in read_list("compare.metrics", plan.get("metrics")):
        metric, is_higher_better = read_metric("compare.metrics", item)
        if not metric.startswith(("test/", "val/")):
            refuse("compare.metrics", "be metrics such as test/personal/accuracy", metric)
        if metric in directions:
            refuse("compare.metrics", "have each metric once", metric)
        directions[metric] = is_higher_better
    baseline = read_selection("compare.baseline", plan.get("baseline", {}), axes)
    declared = {name: item for name, item in directions.items() if item is not None}
    return Comparison(tuple(directions), baseline, declared)
