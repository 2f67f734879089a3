"""The metric that selects the better model of a client."""

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from pl_fed.tasks import Task
from pl_fed.trees import join, select


class Tables(NamedTuple):
    """Tables: the results of a model for each client.

    Attributes:
        correct: Number of correct samples of each class, [clients, classes].
        samples: Number of samples of each class, [clients, classes].
        loss: The mean loss, as in training, times the number of samples, [clients]; NaN where no
            sample counts in it.
        has_loss: Whether a sample counts in each client's loss, bool [clients].
        measures: The task's metrics of each client, [clients, metrics]; NaN where undefined.
        groups: Counts of samples by group and class, int64 [clients, 3, groups, classes], as in
            ``pl_fed.functional.group_fairness``; ``None`` without groups.
    """

    correct: Tensor
    samples: Tensor
    loss: Tensor
    has_loss: Tensor
    measures: Tensor
    groups: Tensor | None = None

    @property
    def mean_losses(self) -> Tensor:
        """The mean loss of each client, [clients]; NaN without samples."""
        return self.loss / self.samples.sum(1)

    def join(self, other: "Tables") -> "Tables":
        """Return the results of these clients, and then those of others."""
        if not len(self.loss):
            return other
        return cast(Tables, join([self, other]))

    def select(self, rows: Tensor) -> "Tables":
        """Return the results of some clients, by their rows, int64 [n]."""
        return cast(Tables, select(self, rows.to(self.loss.device)))


@dataclass(frozen=True)
class Monitor:
    """Monitor: the metric that selects a client's better model; the loss decides between equals.

    Attributes:
        name: ``"accuracy"``, ``"loss"``, or the name of a metric of the task.
        higher_is_better: Whether larger values are better.
        column: Column of the metric among the task's metrics; ``None`` for accuracy and loss.
    """

    name: str
    higher_is_better: bool
    column: int | None = None

    @classmethod
    def from_name(cls, name: str | None, task: Task, classes: int) -> "Monitor":
        """Return the monitor for a name; by default the accuracy, or the first metric.

        The first metric is the task's first one with a known direction.

        Args:
            name: The setting ``federation.monitor``.
            task: The task.
            classes: Number of classes, or 0.

        Raises:
            ValueError: If no metric has this name, or its direction is unknown.
        """
        measures = task.metric_directions()
        losses = ["loss"] if task.has_loss("val") else []
        names = [*(["accuracy"] if classes else []), *measures, *losses]
        if name is None:
            name = next((name for name in names if measures.get(name, True) is not None), "loss")
            names = names if name in names else ["loss"]
        given_name, name = name, name if name in names else task.metric_name(name)
        if name not in names:
            ending = "."
            if name == "loss":
                ending = ", because the evaluation steps neither return nor log a loss."
            raise ValueError(
                f"Expected argument `federation.monitor` to be one of {', '.join(names) or 'none'}"
                f" for the task {type(task).__name__} but got {given_name!r}{ending}"
            )
        if name not in measures:
            return cls(name, name == "accuracy")
        if (higher_is_better := measures[name]) is None:
            raise ValueError(
                "Expected argument `federation.monitor` to be a metric whose direction is known but"
                f" got {given_name!r}: add it to `federation.lower_is_better` or"
                " `federation.higher_is_better`."
            )
        return cls(name, higher_is_better, list(measures).index(name))

    def score(self, tables: Tables) -> Tensor:
        """Return the score of a model for each client; larger is better, and NaN is the worst."""
        if self.column is not None:
            values = tables.measures[:, self.column]
            return values if self.higher_is_better else -values
        if self.name == "accuracy":
            return tables.correct.sum(1).double() / tables.samples.sum(1)
        return -tables.mean_losses


def prefer_second(first: Tables, second: Tables, monitor: Monitor | None = None) -> Tensor:
    """Return a mask of the clients for which the second model is at least as good, bool [clients].

    The metric decides, and then the loss. A loss of NaN is worse than any other. A client without
    data prefers the second model.

    Args:
        first: The results of the first model.
        second: The results of the second model.
        monitor: The metric; accuracy by default.
    """
    lead = second.correct.sum(1) - first.correct.sum(1)  # 0 without classes
    if monitor is not None and monitor.column is not None:
        first_score = monitor.score(first).nan_to_num(-torch.inf)
        second_score = monitor.score(second).nan_to_num(-torch.inf)
        lead = (second_score > first_score).to(torch.int64)
        lead -= (second_score < first_score).to(torch.int64)
    elif monitor is not None and monitor.name == "loss":
        lead = torch.zeros_like(lead)
    return (lead > 0) | ((lead == 0) & ((second.loss <= first.loss) | first.loss.isnan()))
