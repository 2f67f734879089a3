"""The choice of the tested round by a validation metric."""

from dataclasses import dataclass
from typing import Any

from pl_fed.studies.metrics import VALIDATION, read_metric, require_direction
from pl_fed.studies.readers import refuse


@dataclass(frozen=True)
class BestRound:
    """Best round: the round with the tested models.

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
    metric, is_higher_better = read_metric(path, value)
    if not metric.startswith(VALIDATION):
        refuse(path, "be a metric of the validation, such as val/personal/accuracy", metric)
    if is_higher_better is None:
        is_higher_better = require_direction(path, metric, {})
    return BestRound(metric, "max" if is_higher_better else "min")
