"""Means over masked samples, and squared distances between models."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.nets.rows import RowLayout
from pl_fed.trees import Tree, count_samples, leaves, select


def masked_mean(
    values: Tensor, mask: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return the mean of the values selected by a mask: Σ values / Σ weights.

    Args:
        values: Shape [batch].
        mask: bool [batch]; ``None`` selects all.
        weights: The weight of each sample, [batch]; 1 by default. The values already contain their
            weights.

    Returns:
        A scalar; 0 if no value has a weight, as for clients that do not move.

    Example:
        >>> masked_mean(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        tensor(2.)
    """
    if mask is None and weights is None:
        return values.mean()
    weights = torch.ones_like(values) if weights is None else weights.to(values.dtype)
    if mask is not None:
        values, weights = torch.where(mask, values, 0), torch.where(mask, weights, 0)
    total = weights.sum()
    return values.sum() / torch.where(total == 0, 1, total)


def sample_weights(criterion: nn.Module, targets: Tree) -> Tensor | None:
    """Return each sample's share of the divisor in torch's mean cross-entropy.

    Args:
        criterion: The loss.
        targets: Class ids [batch, ...]. With one target a sample, [batch], all ids are at least 0.

    Returns:
        The weight of each sample's class, 0 for ignored samples, [batch]. ``None`` if all weights
        are 1: without class weights and ignored samples, and for all other losses.

    Example:
        >>> criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]), ignore_index=2)
        >>> sample_weights(criterion, torch.tensor([1, 0, 2]))
        tensor([3., 1., 0.])
    """
    if not isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss):
        return None
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    if criterion.weight is None and criterion.ignore_index < 0 and targets.dim() == 1:
        return None
    counts = targets != criterion.ignore_index
    if criterion.weight is None:
        weights = counts.to(torch.get_default_dtype())
    else:
        classes = targets.clamp(0, len(criterion.weight) - 1)
        weights = criterion.weight[classes] * counts
    return weights if weights.dim() == 1 else weights.flatten(1).double().mean(1)


def sample_means(losses: Tensor) -> Tensor:
    """Return the mean loss of each sample, [batch], from losses [batch] or [batch, ...]."""
    return losses if losses.dim() == 1 else losses.flatten(1).mean(1)


def averages_samples(
    value: Callable[[Tree, Tree], Tensor],
    losses: Callable[[Tree, Tree], Tensor],
    outputs: Tree,
    targets: Tree,
    weights: Callable[[Tree], Tensor | None] = lambda _: None,
) -> bool:
    """Return whether the loss of a batch is the mean of its sample losses.

    The function compares three batches: all samples, all but the last, and the first alone. The
    losses of the samples always come from the batch of all samples, as if the others were padding.
    Values that are not finite are ignored.

    Args:
        value: Returns the loss of a batch.
        losses: Returns the loss of each sample. It may fail, or return values of another shape.
        outputs: Outputs of a net for the samples, [batch, ...].
        targets: Targets of the samples, [batch, ...].
        weights: Returns the weight of each sample's loss, or ``None``.

    Example:
        >>> outputs, targets = torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [1.0, -1.0]])
        >>> losses = lambda outputs, targets: (outputs - targets).square().mean(1)
        >>> averages_samples(nn.MSELoss(), losses, outputs, targets)
        True
        >>> averages_samples(nn.MSELoss(reduction="sum"), losses, outputs, targets)
        False
    """
    number = count_samples(targets)
    try:
        sample_losses = losses(outputs, targets)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
        return False
    if sample_losses.shape != (number,):
        return False
    loss_weights, positions = weights(targets), torch.arange(number)
    for size in sorted({1, number - 1, number} - {0}):
        mask = (positions < size).to(sample_losses.device)
        samples = slice(0, size)
        loss = _compute_loss(value, select(outputs, samples), select(targets, samples)).double()
        mean = masked_mean(sample_losses, mask, loss_weights).double()
        if (loss - mean).isfinite() and not torch.isclose(loss, mean, rtol=1e-4, atol=1e-6):
            return False
    return True


def _compute_loss(value: Callable[[Tree, Tree], Tensor], outputs: Tree, targets: Tree) -> Tensor:
    """Return the loss of a batch; NaN if the loss fails on so few samples."""
    try:
        return value(outputs, targets)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
        return torch.full((), torch.nan, device=leaves(targets)[0].device)


def squared_distance(tensors: Sequence[Tensor], centre: Sequence[Tensor]) -> Tensor:
    """Return ‖a − c‖², summed over all tensors of a model.

    Args:
        tensors: The model's parameters a; they receive the gradient.
        centre: As many tensors c of the parameters' shapes; they receive no gradient.

    Example:
        >>> squared_distance([torch.ones(2), torch.zeros(1)], [torch.zeros(2), torch.ones(1)])
        tensor(3.)
    """
    return torch.stack([(a - c.detach()).square().sum() for a, c in zip(tensors, centre)]).sum()


class RowDistance(torch.autograd.Function):
    """Row distance: :func:`squared_distance` ‖a − c‖² of two models in flat rows, but faster.

    Call ``RowDistance.apply(row, centre, layout, *parameters)``:

    - ``row`` [numel] is the storage of the parameters; they are views of it.
    - ``centre`` [numel] is the other model; it receives no gradient.
    - ``layout`` gives the positions of the parameters in the row.
    - ``parameters`` receive the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, row: Tensor, centre: Tensor, layout: RowLayout, *parameters: Tensor
    ) -> Tensor:
        """Sum the squares, and save the difference for the gradient 2 (a − c)."""
        ctx.save_for_backward(*parameters)
        ctx.layout, ctx.centre, ctx.difference = layout, centre, row - centre
        return torch.dot(ctx.difference, ctx.difference)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """Return 2 (a − c) times the incoming gradient, in the parameters' shapes."""
        factor = 2 * grad_outputs[0]
        if torch.is_grad_enabled():  # for second derivatives
            centres = ctx.layout.views(ctx.centre).values()
            pieces = [factor * (p - c) for p, c in zip(ctx.saved_tensors, centres)]
        else:
            pieces = ctx.layout.pieces(ctx.difference * factor)
        return None, None, None, *pieces
