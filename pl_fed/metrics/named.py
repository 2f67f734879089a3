"""Metrics of ``federation.metrics``: their names, and the arguments of binary metrics."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torchmetrics import Metric

from pl_fed.arguments import check_instances

_WORD_BREAKS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def name_metrics(metrics: Mapping[str, Metric] | Sequence[Metric] | None) -> dict[str, Metric]:
    """Return metrics by name: by the names of a mapping, or by their classes.

    Args:
        metrics: Metrics of torchmetrics, by name or as a list.

    Raises:
        TypeError: If one is no metric.
        ValueError: If two metrics in a list have the same class.

    Example:
        >>> from torchmetrics.classification import BinaryAUROC, MulticlassF1Score
        >>> list(name_metrics([BinaryAUROC(), MulticlassF1Score(10)]))
        ['binary_auroc', 'multiclass_f1_score']
    """
    if isinstance(metrics, Mapping):
        for name, metric in metrics.items():
            check_instances(Metric, **{f"metrics.{name}": metric})
        return dict(metrics)
    named: dict[str, Metric] = {}
    for metric in metrics or []:
        check_instances(Metric, metrics=metric)
        name = _WORD_BREAKS.sub("_", type(metric).__name__).lower()
        if name in named:
            raise ValueError(
                f"Expected argument `federation.metrics` to have one {type(metric).__name__} but"
                " got two: give a mapping with a name for each metric."
            )
        named[name] = metric
    return named


def metric_arguments(metric: Metric, predictions: Any, targets: Any) -> tuple[Any, Any]:
    """Return the arguments of a metric's ``update``.

    A binary metric of torchmetrics takes one probability for each target. It gets the probability
    of class 1 if there are two classes. All other metrics get their arguments unchanged.

    Args:
        metric: The metric.
        predictions: Predictions of a task, for example probabilities [samples, classes].
        targets: Targets of a task, for example class ids [samples].

    Example:
        >>> import torch
        >>> from torchmetrics.classification import BinaryAUROC
        >>> probabilities = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
        >>> metric_arguments(BinaryAUROC(), probabilities, torch.tensor([0, 1]))
        (tensor([0.1000, 0.7000]), tensor([0, 1]))
    """
    is_binary = type(metric).__name__.startswith("Binary")
    if not is_binary or not isinstance(predictions, Tensor) or not isinstance(targets, Tensor):
        return predictions, targets
    if predictions.dim() == targets.dim() + 1 and predictions.shape[1] == 2:
        predictions = predictions[:, 1]
    if predictions.numel() == targets.numel():
        predictions = predictions.reshape(targets.shape)
    return predictions, targets.long()
