"""The metric by which models are chosen."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pl_fed.tasks import Task


class Tables(NamedTuple):
    """How good a model is for each of some clients.

    Attributes:
        correct: Correct samples of each class, [clients, classes].
        samples: Samples of each class, [clients, classes].
        loss: The mean loss, as in training, times the number of samples, [clients].
        measures: The task's metrics, each client's own, [clients, metrics]; NaN where undefined.
    """

    correct: Tensor
    samples: Tensor
    loss: Tensor
    measures: Tensor


@dataclass(frozen=True)
class Monitor:
    """The metric by which a client's better model is chosen; of equal ones, the loss decides.

    Attributes:
        name: ``"accuracy"``, ``"loss"``, or a metric of the task.
        higher_is_better: Whether larger values are better.
        place: Its position among the task's metrics, if it is one of them.
    """

    name: str
    higher_is_better: bool
    place: int | None = None

    @classmethod
    def of(cls, name: str | None, task: Task, classes: int) -> "Monitor":
        """Return the metric of a name; by default the accuracy, or the task's first metric.

        Args:
            name: What ``federation.monitor`` says.
            task: The task.
            classes: Number of classes, or 0.

        Raises:
            ValueError: If there is no such metric.
        """
        measures = directions(task)
        names = [*(["accuracy"] if classes else []), *measures, "loss"]
        if name is None:
            name = names[0]
        if name not in names:
            raise ValueError(
                f"Expected argument `federation.monitor` to be one of {', '.join(names)} for the"
                f" task {type(task).__name__} but got {name!r}."
            )
        if name in measures:
            return cls(name, measures[name], list(measures).index(name))
        return cls(name, name == "accuracy")

    def score(self, tables: Tables) -> Tensor:
        """Return how good a model is for each client: larger is better, and NaN worse than any."""
        if self.place is not None:
            values = tables.measures[:, self.place]
            return values if self.higher_is_better else -values
        if self.name == "accuracy":
            return tables.correct.sum(1).double() / tables.samples.sum(1)
        return -tables.loss / tables.samples.sum(1)


def directions(task: Task) -> Mapping[str, bool]:
    """Return the names of a task's metrics, and whether larger values are better.

    A metric of torchmetrics that does not say counts as better if larger.
    """
    return {name: metric.higher_is_better is not False for name, metric in task.metrics().items()}


def better(one: Tables, other: Tables, monitor: Monitor | None = None) -> Tensor:
    """Return for which clients the other model is at least as good: by a metric, then by loss.

    So it is where there is no data to tell. A loss that is NaN is worse than any.

    Args:
        one: Of one model.
        other: Of the other.
        monitor: The metric; accuracy by default.
    """
    (right, _, loss), (rights, _, losses) = one[:3], other[:3]
    lead = rights.sum(1) - right.sum(1)  # 0 where there are no classes
    if monitor is not None and monitor.place is not None:
        mine, others = (monitor.score(tables).nan_to_num(-torch.inf) for tables in (one, other))
        lead = (others > mine).to(torch.int64) - (others < mine).to(torch.int64)
    elif monitor is not None and monitor.name == "loss":
        lead = torch.zeros_like(lead)
    return (lead > 0) | ((lead == 0) & ((losses <= loss) | loss.isnan()))
