"""Experiments of loggers that begin at their first use, so that a refused resume writes nothing."""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.loggers import Logger


class PostponedExperiment:
    """Postponed experiment: stands for a logger's experiment, and begins it at the first use.

    Lightning begins all experiments before it loads a checkpoint, so that a run of W&B or a file of
    TensorBoard begins even if the checkpoint is refused.

    Args:
        logger: A logger without an experiment.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        """Begin the experiment, and return its attribute."""
        forget_postponed([self._logger])
        return getattr(self._logger.experiment, name)

    def __bool__(self) -> bool:
        """Return that there is no experiment yet: loggers ask before they read its id."""
        return False


def postpone_experiments(loggers: Iterable[Logger]) -> None:
    """Let the experiments of loggers begin at their first use."""
    for logger in loggers:
        if vars(logger).get("_experiment", logger) is None:
            logger._experiment = PostponedExperiment(logger)  # type: ignore[attr-defined]


def forget_postponed(loggers: Iterable[Logger]) -> None:
    """Leave loggers without an experiment if theirs has not begun."""
    for logger in loggers:
        if isinstance(vars(logger).get("_experiment"), PostponedExperiment):
            logger._experiment = None  # type: ignore[attr-defined]
