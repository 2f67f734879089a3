"""The metrics of a task, of each client by itself."""

import warnings
from typing import Any

import torch
from torch import Tensor

from pl_fed.evaluation.waiting import WaitingSamples
from pl_fed.tasks import Task
from pl_fed.trees import Tree

_UNDEFINED = (RuntimeError, ValueError, IndexError)  # of R² of one sample, say


class ClientMeasures:
    """A task's metrics of some clients, of whose samples batches come one after the other.

    Each client's metrics see its own samples only. Where a metric refuses them, as R² refuses a
    single one, it is NaN.

    Args:
        task: The task.
        sizes: The number of samples of each client, int64 [clients].
        device: Where the outputs are.

    Attributes:
        values: float64 [clients, metrics]; NaN until a client's samples are complete.
    """

    def __init__(self, task: Task, sizes: Tensor, device: torch.device) -> None:
        self.task = task
        self.metrics = local_metrics(task, device)
        self.values = torch.full(
            (len(sizes), len(self.metrics)), torch.nan, dtype=torch.float64, device=device
        )
        self._waiting = WaitingSamples(sizes.tolist())
        self._begun: dict[int, dict[str, Any]] = {}  # of clients that come in parts

    def add(self, positions: Tensor, outputs: Tree, targets: Tree) -> None:
        """Add samples, of the clients at these positions, int64 [samples]."""
        if not self.metrics:
            return
        for position, own, wanted in self._waiting.add(positions, outputs, targets):
            metrics = self._begun.pop(position, None)
            if metrics is None:
                metrics = self.metrics
                for metric in metrics.values():
                    metric.reset()
                if not self._waiting.is_complete(position):
                    metrics = local_metrics(self.task, self.values.device)
            complete = self._waiting.is_complete(position)
            values = measure(metrics, *self.task.measured(own, wanted), computes=complete)
            if complete:
                self.values[position] = self.values.new_tensor(values)
            else:
                self._begun[position] = metrics


def local_metrics(task: Task, device: torch.device) -> dict[str, Any]:
    """Return a task's metrics by name; they are of one client, and so of this process alone."""
    metrics = {name: metric.to(device) for name, metric in task.metrics().items()}
    for metric in metrics.values():
        metric.distributed_available_fn = _never
    return metrics


def measure(
    metrics: dict[str, Any], predictions: Any, targets: Any, computes: bool = True
) -> list[float]:
    """Update metrics by samples, and return their values; NaN for those that refuse them.

    Args:
        metrics: The metrics, by name.
        predictions: Predictions, as the metrics take them.
        targets: Targets, as the metrics take them.
        computes: Whether values are computed; else they are NaN.
    """
    values = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is undefined, which is NaN here
        for metric in metrics.values():
            try:
                metric.update(predictions, targets)
                values.append(float(metric.compute()) if computes else torch.nan)
            except _UNDEFINED:
                values.append(torch.nan)
    return values


def _never() -> bool:
    return False
