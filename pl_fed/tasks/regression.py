"""Regression: each sample has one or several real numbers as its target."""

from typing import Any

from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection, R2Score

from pl_fed.tasks.base import as_floats, check_tensor
from pl_fed.tasks.criterion import CriterionTask
from pl_fed.trees import Tree, describe


class Regression(CriterionTask):
    """Regression: the net predicts real numbers.

    The metrics of a client are ``mae``, the mean absolute error; ``rmse``, the root of the mean
    squared error; and ``r2``, the share of explained variance. ``r2`` is NaN for a client
    with one sample of one target. Several targets of a sample count as one list of numbers, for
    these and for ``federation.metrics``: targets on a large scale dominate, so standardize them.

    Args:
        criterion: The loss; the mean squared error by default. See :class:`CriterionTask`.

    Shape:
        - outputs, targets: real numbers, [batch, ...], equally many of both for each sample.

    Example:
        >>> import torch
        >>> Regression().batch_loss(torch.zeros(2, 1), torch.tensor([[1.0], [3.0]]))
        tensor(5.)
    """

    def __init__(self, criterion: nn.Module | None = None) -> None:
        super().__init__(nn.MSELoss() if criterion is None else criterion)

    def metrics(self) -> MetricCollection:
        """Return ``mae``, ``rmse`` and ``r2``."""
        return MetricCollection(
            {
                "mae": MeanAbsoluteError(),
                "rmse": MeanSquaredError(squared=False),
                "r2": R2Score(),
            },
            compute_groups=False,
        )

    def metric_inputs(self, outputs: Tree, targets: Tree) -> tuple[Any, Any]:
        """Return all numbers in one dimension."""
        return as_floats(outputs).flatten(), targets.flatten()

    def predictions(self, outputs: Tree) -> dict[str, Tensor]:
        """Return the outputs."""
        return {"prediction": as_floats(outputs)}

    def check_targets(self, targets: Tree, data_classes: int) -> None:
        """Refuse targets that are not real numbers."""
        if not isinstance(targets, Tensor) or not targets.is_floating_point():
            raise ValueError(
                f"Expected the data to have real-valued targets for the task Regression but got"
                f" {describe(targets)}: give the targets as floating-point numbers."
            )

    def check_outputs(self, outputs: Tree, targets: Tree, data_classes: int) -> None:
        """Refuse a net unless it returns as many numbers as there are targets."""
        check_tensor(outputs)
        super().check_outputs(outputs, targets, data_classes)
        if outputs.numel() != targets.numel():
            raise ValueError(
                "Expected argument `net` to return as many numbers as there are targets, shape"
                f" {list(targets.shape)}, but got {list(outputs.shape)}."
            )
