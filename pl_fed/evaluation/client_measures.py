"""The metrics of a task for each client, on its own samples."""

import warnings
from typing import Any

import torch
from torch import Tensor

from pl_fed.evaluation.sample_collector import SampleCollector
from pl_fed.metrics.named import metric_arguments
from pl_fed.tasks import Task
from pl_fed.tasks.metric_values import local_metrics, metric_value
from pl_fed.trees import Tree


class ClientMeasures:
    """Client measures: a task's metrics of each client, from batches of samples.

    A client's metrics see its own samples only. A metric that refuses the samples is NaN, for
    example R² of a single sample.

    Args:
        task: The task.
        sizes: Number of samples of each client, int64 [clients].
        device: The device of the outputs.

    Attributes:
        values: float64 [clients, metrics]; NaN until all samples of a client are added.
    """

    def __init__(self, task: Task, sizes: Tensor, device: torch.device) -> None:
        self.task = task
        self.metrics = local_metrics(task, device)
        self.values = torch.full(
            (len(sizes), len(self.metrics)), torch.nan, dtype=torch.float64, device=device
        )
        self._collector = SampleCollector(sizes.tolist())
        self._partial: dict[int, dict[str, Any]] = {}  # metrics of clients in parts

    def add(self, positions: Tensor, outputs: Tree, targets: Tree) -> None:
        """Add samples; ``positions`` are the positions of their clients, int64 [samples]."""
        if not self.metrics:
            return
        for position, own_outputs, own_targets in self._collector.add(positions, outputs, targets):
            metrics = self._partial.pop(position, None)
            if metrics is None:
                metrics = self.metrics
                for metric in metrics.values():
                    metric.reset()
                if not self._collector.is_complete(position):
                    metrics = local_metrics(self.task, self.values.device)
            complete = self._collector.is_complete(position)
            measured = self.task.metric_inputs(own_outputs, own_targets)
            values = measure(metrics, *measured, computes=complete)
            if complete:
                self.values[position] = self.values.new_tensor(values)
            else:
                self._partial[position] = metrics


def measure(
    metrics: dict[str, Any], predictions: Any, targets: Any, computes: bool = True
) -> list[float]:
    """Update metrics by samples, and return their values; NaN for a metric that refuses them.

    Args:
        metrics: The metrics, by name.
        predictions: Predictions, as the metrics take them.
        targets: Targets, as the metrics take them.
        computes: Whether to compute the values; otherwise they are NaN.
    """
    values = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for metric in metrics.values():
            arguments = metric_arguments(metric, predictions, targets)
            values.append(metric_value(metric, arguments, computes))
    return values
