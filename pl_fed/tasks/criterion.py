"""A task that is known by its criterion: the module that gives its loss."""

import copy
import warnings

import torch
from torch import Tensor, nn

from pl_fed.functional.losses import sample_means, sample_weights
from pl_fed.tasks.base import Task
from pl_fed.trees import Tree, rows_of


class CriterionTask(Task):
    """Any task, by its criterion; the only metric is the loss.

    Args:
        criterion: Turns outputs and targets into a mean loss: a module with ``reduction``, as
            those of ``torch.nn``. Where it is not the mean of one loss for each sample, as
            ``reduction="none"`` gives them, it is called on batches without padding.

    Raises:
        ValueError: If the criterion's ``reduction`` is not ``"mean"``.

    Example:
        >>> task = CriterionTask(nn.L1Loss())
        >>> task.batch_loss(torch.zeros(2, 1), torch.tensor([[1.0], [3.0]]))
        tensor(2.)
    """

    def __init__(self, criterion: nn.Module) -> None:
        if getattr(criterion, "reduction", None) != "mean":
            raise ValueError(
                'Expected argument `criterion` to be a loss with `reduction="mean"`, as'
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
            ValueError: If the criterion has none.
        """
        losses: Tensor = self.sample_criterion(outputs, targets)
        if losses.shape[:1] != (rows_of(targets),):
            raise ValueError(
                f'Expected {self.name} with reduction="none" to give a loss for each of'
                f" {rows_of(targets)} samples but got shape {list(losses.shape)}."
            )
        return sample_means(losses)

    def weights(self, targets: Tree) -> Tensor | None:
        """Return the weights of samples in a cross entropy, by their classes."""
        return sample_weights(self.criterion, targets)

    def batch_loss(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return what the criterion gives."""
        value: Tensor = self.criterion(outputs, targets)
        return value

    def check_targets(self, targets: Tree, data_classes: int) -> None:
        """Refuse real-valued targets of a cross entropy that are no probabilities of classes."""
        if not isinstance(self.criterion, nn.CrossEntropyLoss):
            return
        if not isinstance(targets, Tensor) or not targets.is_floating_point():
            return
        if targets.dim() == 1:  # which it does not take
            return
        if targets.shape[1] > 1:
            total = targets.sum(1)
            ones = torch.allclose(total, torch.ones_like(total), atol=1e-3)
            if ones and bool((targets >= 0).all()):
                return
        raise ValueError(
            "Expected argument `criterion` to be a loss of real-valued targets, as"
            " torch.nn.MSELoss or torch.nn.BCEWithLogitsLoss, but got CrossEntropyLoss, and targets"
            " that are no probabilities of classes."
        )

    def check_outputs(self, outputs: Tree, targets: Tree, data_classes: int) -> None:
        """Refuse a criterion that compares what a sample gives with the targets of others."""
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            return
        if outputs.dim() == targets.dim() or not targets.is_floating_point():
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says so in other words
            try:
                losses = self.sample_criterion(outputs, targets)
                aligned = torch.broadcast_shapes(outputs.shape, targets.shape)
            except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
                return  # what the criterion gives for a batch counts
        if isinstance(losses, Tensor) and losses.dim() > 1 and losses.shape == aligned:
            raise ValueError(
                "Expected argument `net` to give outputs of the targets' shape"
                f" {list(targets.shape)} but got {list(outputs.shape)}, of which {self.name} would"
                " compare each with all targets: give the targets as many dimensions, [samples, 1]"
                " for one number each."
            )
