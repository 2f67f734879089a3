"""Names of metrics in a study: their directions, and the choice of a round by one of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pl_fed.studies.readers import StudyError, read_mapping, read_text, refuse
from pl_fed.tasks.directions import guess_direction

VALIDATION = "val/"
"""The beginning of the names of validation metrics."""

_LOWER_SUFFIXES = ("_std", "_var", "_undefined")
_HIGHER_SUFFIXES = ("_jain",)
_SHARED_SUFFIXES = ("_worst10", "_best10", "_weighted", "_trained")
_MODES = ("max", "min")


@dataclass(frozen=True)
class BestRound:
    """Best round: the round whose models are tested.

    Attributes:
        metric: The validation metric that chooses, such as ``val/personal/accuracy``.
        mode: ``max`` or ``min``.
    """

    metric: str
    mode: str


def read_best_round(path: str, value: Any) -> BestRound | None:
    """Return the choice of a round that a study file describes; ``None`` without one.

    Args:
        path: The path of the value in the study.
        value: A metric, or a mapping of ``metric`` and ``mode``.

    Raises:
        StudyError: If the value describes none, or the direction of the metric is unknown.
    """
    if value is None:
        return None
    content = value if isinstance(value, Mapping) else {"metric": value}
    plan = read_mapping(path, content, ("metric", "mode"))
    metric, mode = read_text(path, plan.get("metric")), plan.get("mode")
    if not metric.startswith(VALIDATION):
        refuse(path, "be a metric of the validation, such as val/personal/accuracy", metric)
    if mode is None:
        remedy = "write {metric: ..., mode: max} or mode: min"
        mode = "max" if find_direction(path, metric, {}, remedy) else "min"
    if mode not in _MODES:
        refuse(f"{path}.mode", f"be {' or '.join(_MODES)}", mode)
    return BestRound(metric, str(mode))


def find_direction(
    path: str,
    metric: str,
    directions: Mapping[str, bool | None],
    remedy: str = "declare it by `federation.higher_is_better` or `federation.lower_is_better`",
) -> bool:
    """Return whether larger values of a metric are better.

    Args:
        path: The path of the metric in the study.
        metric: The metric with its model, such as ``val/personal/accuracy_worst10``.
        directions: The directions of metrics without statistics over clients.
        remedy: The advice, if the direction is unknown.

    Raises:
        StudyError: If it is unknown.

    Example:
        >>> find_direction("tune.metric", "val/global/loss_std", {})
        False
    """
    name = metric.removeprefix(VALIDATION).partition("/")[2]
    if name.endswith(_LOWER_SUFFIXES):
        return False
    if name.endswith(_HIGHER_SUFFIXES):
        return True
    for suffix in _SHARED_SUFFIXES:
        name = name.removesuffix(suffix)
    direction = directions.get(name, guess_direction(name))
    if direction is None:
        raise StudyError(
            f"Expected argument `{path}` to be a metric of which larger or smaller values are"
            f" better but got {metric}, of which this is unknown: {remedy}."
        )
    return direction
