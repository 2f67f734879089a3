"""The choice of the round whose models a study tests, by a validation metric."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pl_fed.studies.metrics import VALIDATION, find_direction
from pl_fed.studies.readers import read_mapping, read_text, refuse

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
        is_larger_better = find_direction(metric, {})
        if is_larger_better is None:
            remedy = "write {metric: ..., mode: max} or mode: min"
            refuse(path, "be a metric with a direction that its name tells", metric, remedy)
        mode = "max" if is_larger_better else "min"
    if mode not in _MODES:
        refuse(f"{path}.mode", f"be {' or '.join(_MODES)}", mode)
    return BestRound(metric, str(mode))
