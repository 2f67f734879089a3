"""Metrics of a study: the model that a run is read by, and the direction of a metric."""

from collections.abc import Iterable, Mapping
from typing import Any

from pl_fed.functional.client_figures import split_figure
from pl_fed.studies.readers import read_mapping, read_text, refuse
from pl_fed.tasks.directions import guess_direction

VALIDATION = "val/"
"""The beginning of the names of validation metrics."""

_MODES = {"max": True, "min": False}
_LOWER_SUFFIXES = ("_std", "_var", "_undefined")
_HIGHER_SUFFIXES = ("_jain",)
_SHARED_SUFFIXES = ("_worst10", "_best10", "_weighted", "_trained", "_max")
_TRAINED = "_trained"  # within the names of metrics over the clients that took part
_OF_EVALUATIONS = {
    "backdoor_success": False,
    "detection_precision": True,
    "detection_recall": True,
    "global_durability": False,
    "personal_durability": False,
    **{f"group/{kind}accuracy_worst": True for kind in ("", "client_")},
    **{
        f"group/{kind}{name}": False
        for kind in ("", "client_")
        for name in ("demographic_parity", "equalized_odds", "accuracy_gap")
    },
}


def choose_model(metric: str, names: Iterable[str]) -> str:
    """Return the metric that a run is read by: of its global model if it has no personal one.

    Args:
        metric: The metric with its stage, such as ``test/personal/accuracy``.
        names: The metrics of the run, with their stages.

    Example:
        >>> choose_model("test/personal/accuracy", ["test/global/accuracy"])
        'test/global/accuracy'
    """
    stage = metric.partition("/")[0]
    if any(name.startswith(f"{stage}/personal/") for name in names):
        return metric
    return metric.replace("/personal/", "/global/", 1)


def choose_name(metric: str, names: Iterable[str], untrained: float | None) -> str:
    """Return the name under which a run has a metric: see :func:`choose_model`.

    A metric over trained clients is the metric over all clients if each took part: such a run has
    no metric of its own over trained clients.

    Args:
        metric: The metric with its stage, such as ``test/personal/accuracy_trained``.
        names: The metrics of the run, with their stages.
        untrained: The number of benign clients that never took part; ``None`` if it is unknown.

    Example:
        >>> choose_name("test/global/loss_trained_std", ["test/global/loss_std"], untrained=0)
        'test/global/loss_std'
    """
    name = choose_model(metric, names)
    is_same = untrained == 0 and name not in names and "/held_out/" not in name
    return name.replace(_TRAINED, "") if is_same else name


def find_direction(metric: str, directions: Mapping[str, bool | None]) -> bool | None:
    """Return whether larger values of a metric are better; ``None`` if nobody knows.

    Args:
        metric: The metric with its stage and model, such as ``val/personal/accuracy_worst10``.
        directions: The directions of metrics without statistics over clients.

    Example:
        >>> find_direction("test/global/accuracy_worst10", {})
        True
        >>> find_direction("test/held_out/personal/loss", {})
        False
        >>> find_direction("test/personal/backdoor_success_max", {})
        False
        >>> find_direction("test/global/group/client_equalized_odds_worst10", {})
        False
        >>> [find_direction(f"test/global/loss_{end}", {}) for end in ("gini", "entropy", "worst5")]
        [False, True, False]
    """
    name = metric.replace("/held_out/", "/", 1).split("/", 2)[-1]
    if (declared := directions.get(name)) is not None:
        return declared
    if name.endswith(_LOWER_SUFFIXES):
        return False
    if name.endswith(_HIGHER_SUFFIXES):
        return True
    if (parts := split_figure(name)) is not None:
        name, figure = parts
        if figure.higher_is_better is not None:
            return figure.higher_is_better
    for suffix in _SHARED_SUFFIXES:
        name = name.removesuffix(suffix)
    return directions.get(name, _OF_EVALUATIONS.get(name, guess_direction(name)))


def require_direction(path: str, metric: str, directions: Mapping[str, bool | None]) -> bool:
    """Return whether larger values of a metric are better.

    Args:
        path: The path of the metric in the study.
        metric: The metric with its stage and model.
        directions: The directions of metrics without statistics over clients.

    Raises:
        StudyError: If nobody knows.
    """
    direction = find_direction(metric, directions)
    if direction is None:
        remedy = f"write {{metric: {metric}, mode: max}}, or mode: min"
        refuse(path, "be a metric with a known direction", metric, remedy)
    return direction


def read_metric(path: str, value: Any) -> tuple[str, bool | None]:
    """Return a metric of a study file, and whether larger values are better, if it tells.

    Args:
        path: The path of the value in the study.
        value: The metric, or a mapping of ``metric`` and ``mode`` (``max`` or ``min``).

    Raises:
        StudyError: If the value describes no metric.
    """
    plan = read_mapping(path, value, ("metric", "mode")) if isinstance(value, Mapping) else {}
    metric, mode = read_text(path, plan.get("metric") if plan else value), plan.get("mode")
    if mode is None:
        return metric, None
    if mode not in _MODES:
        refuse(f"{path}.mode", f"be {' or '.join(_MODES)}", mode)
    return metric, _MODES[str(mode)]
