"""The task of a criterion: a module that computes the loss."""

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.functional.losses import sample_means, sample_weights
from pl_fed.tasks.base import Task
from pl_fed.trees import Tree, clone, count_samples


class CriterionTask(Task):
    """Criterion task: any learning problem with a criterion; its only metric is the loss.

    Args:
        criterion: Computes the mean loss from outputs and targets: a module with ``reduction``,
            like the losses of ``torch.nn``. With ``reduction="none"`` it should return one loss per
            sample. If the mean loss is not the mean of these, pl_fed calls the criterion on batches
            without padding.

    Attributes:
        changes_targets: Whether the criterion changes the targets in place, and so gets a copy of
            them: the next model has the same minibatch. Determined before training.

    Raises:
        ValueError: If the criterion's ``reduction`` is not ``"mean"``.

    Example:
        >>> task = CriterionTask(nn.L1Loss())
        >>> task.batch_loss(torch.zeros(2, 1), torch.tensor([[1.0], [3.0]]))
        tensor(2.)
    """

    changes_targets: bool = False

    def __init__(self, criterion: nn.Module) -> None:
        if getattr(criterion, "reduction", None) != "mean":
            raise ValueError(
                'Expected argument `criterion` to be a loss with `reduction="mean"`, as in'
                f" torch.nn.CrossEntropyLoss(), but got {type(criterion).__name__} with"
                f" {getattr(criterion, 'reduction', 'no reduction')!r}."
            )
        self.criterion = criterion
        self.sample_criterion = copy.deepcopy(criterion)
        setattr(self.sample_criterion, "reduction", "none")  # noqa: B010 (for mypy)

    @property
    def name(self) -> str:
        """The criterion's class."""
        return type(self.criterion).__name__

    def losses(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return the loss of each sample, [batch].

        Raises:
            ValueError: If the criterion does not return one loss per sample.
        """
        losses: Tensor = self._call(self.sample_criterion, outputs, targets)
        if losses.shape[:1] != (count_samples(targets),):
            raise ValueError(
                f'Expected {self.name} with reduction="none" to return a loss for each of'
                f" {count_samples(targets)} samples but got shape {list(losses.shape)}."
            )
        return sample_means(losses)

    def weights(self, targets: Tree) -> Tensor | None:
        """Return the samples' class weights in a cross entropy."""
        return sample_weights(self.criterion, targets)

    def batch_loss(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return the criterion's value."""
        value: Tensor = self._call(self.criterion, outputs, targets)
        return value

    def _call(self, criterion: nn.Module, outputs: Tree, targets: Tree) -> Any:
        """Return the value of a criterion; one that changes the targets in place gets a copy."""
        return criterion(outputs, clone(targets) if self.changes_targets else targets)

    def check_targets(self, targets: Tree, data_classes: int) -> None:
        """Refuse real-valued targets of a cross entropy unless they are class probabilities."""
        if not isinstance(self.criterion, nn.CrossEntropyLoss):
            return
        if not isinstance(targets, Tensor) or not targets.is_floating_point():
            return
        if targets.dim() == 1:  # torch raises its own error
            return
        if targets.shape[1] > 1:
            sums = targets.sum(1)
            sums_are_one = torch.allclose(sums, torch.ones_like(sums), atol=1e-3)
            if sums_are_one and bool((targets >= 0).all()):
                return
        raise ValueError(
            "Expected argument `criterion` to be a loss of real-valued targets, as"
            " torch.nn.MSELoss or torch.nn.BCEWithLogitsLoss, but got CrossEntropyLoss, and targets"
            " that are not class probabilities."
        )

    def check_outputs(self, outputs: Tree, targets: Tree, data_classes: int) -> None:
        """Refuse shapes that make the criterion compare a sample's output with other targets."""
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            return
        if outputs.dim() == targets.dim() or not targets.is_floating_point():
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the same mistake
            try:
                losses = self._call(self.sample_criterion, outputs, targets)
                broadcast_shape = torch.broadcast_shapes(outputs.shape, targets.shape)
            except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
                return  # only the criterion's value for a batch matters
        if isinstance(losses, Tensor) and losses.dim() > 1 and losses.shape == broadcast_shape:
            raise ValueError(
                "Expected argument `net` to return outputs of the targets' shape"
                f" {list(targets.shape)} but got {list(outputs.shape)}, and {self.name} would"
                " compare each output with all targets: give the targets the same number of"
                " dimensions, [samples, 1] for one number each."
            )
