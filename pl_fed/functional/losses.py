"""Averages that honour a mask, and the squared distance that pulls one model to another."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of the values whose mask is true.

    Args:
        values: Shape [batch].
        mask: bool [batch], or ``None`` for all.

    Returns:
        A scalar; 0 where nothing counts (a client that stands still).

    Example:
        >>> masked_mean(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        tensor(2.)
    """
    if mask is None:
        return values.mean()
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)


def squared_distance(tensors: Sequence[Tensor], centre: Sequence[Tensor]) -> Tensor:
    """Return ‖a − c‖² over all tensors of a model.

    Args:
        tensors: The model's parameters, in which the result can be differentiated.
        centre: As many tensors of the same shapes; they receive no gradient.

    Example:
        >>> squared_distance([torch.ones(2), torch.zeros(1)], [torch.zeros(2), torch.ones(1)])
        tensor(3.)
    """
    return torch.stack([(a - c.detach()).square().sum() for a, c in zip(tensors, centre)]).sum()


class RowDistance(torch.autograd.Function):
    """‖a − c‖² of two models that lie in flat rows: :func:`squared_distance` in three operations.

    ``RowDistance.apply(row, centre, *parameters)``: ``row`` [numel] is the storage on which
    the parameters are views, one behind the other; ``centre`` [numel] gets no gradient.
    """

    @staticmethod
    def forward(ctx: Any, row: Tensor, centre: Tensor, *parameters: Tensor) -> Tensor:
        """Sum the squares, and keep the difference for the gradient 2 (a − c)."""
        ctx.difference = row - centre
        ctx.shapes = [parameter.shape for parameter in parameters]
        return torch.dot(ctx.difference, ctx.difference)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """Return 2 (a − c) times the incoming gradient, cut into the parameters' shapes."""
        gradient = ctx.difference * (2 * grad_outputs[0])
        pieces = gradient.split([shape.numel() for shape in ctx.shapes])
        return (None, None, *(piece.view(shape) for piece, shape in zip(pieces, ctx.shapes)))
