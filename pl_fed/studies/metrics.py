"""Metrics of a study: the model that a run is read by, and the direction of a metric."""

from collections.abc import Iterable, Mapping

from pl_fed.tasks.directions import guess_direction

VALIDATION = "val/"
"""The beginning of the names of validation metrics."""

_LOWER_SUFFIXES = ("_std", "_var", "_undefined")
_HIGHER_SUFFIXES = ("_jain",)
_SHARED_SUFFIXES = ("_worst10", "_best10", "_weighted", "_trained")


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


def find_direction(metric: str, directions: Mapping[str, bool | None]) -> bool | None:
    """Return whether larger values of a metric are better; ``None`` if nobody knows.

    Args:
        metric: The metric with its stage and model, such as ``val/personal/accuracy_worst10``.
        directions: The directions of metrics without statistics over clients.

    Example:
        >>> find_direction("test/global/accuracy_worst10", {})
        True
    """
    name = metric.split("/", 2)[-1]
    if name.endswith(_LOWER_SUFFIXES):
        return False
    if name.endswith(_HIGHER_SUFFIXES):
        return True
    for suffix in _SHARED_SUFFIXES:
        name = name.removesuffix(suffix)
    return directions.get(name, guess_direction(name))
