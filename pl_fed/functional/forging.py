"""What attacks on uploads are made of: rows, in float32 at least."""

import torch
from torch import Tensor

from pl_fed.functional.aggregation import merging_dtype
from pl_fed.nets.rows import finite_rows


def known_rows(honest: Tensor, own: Tensor) -> Tensor:
    """Return the uploads that attackers go by: the honest ones, or their own if there are none.

    Example:
        >>> known_rows(torch.empty(0, 1), torch.tensor([[1.0], [torch.nan]]))
        tensor([[1.]])
    """
    return honest if len(honest) else own[finite_rows(own)]


def mean_row(rows: Tensor) -> Tensor:
    """Return the mean of rows [n, d], in float32 at least."""
    return rows.mean(0, dtype=merging_dtype(rows))


def standard_deviations(rows: Tensor, mean: Tensor) -> Tensor:
    """Return the standard deviation of each column, of the population.

    Args:
        rows: Shape [n, d].
        mean: Their mean, in the type to compute in, [d].

    Returns:
        Shape [d].

    Example:
        >>> rows = torch.tensor([[1.0], [5.0]])
        >>> standard_deviations(rows, mean_row(rows))
        tensor([2.])
    """
    squares = torch.zeros_like(mean)
    for row in rows:
        gap = row - mean
        squares.addcmul_(gap, gap, value=1 / len(rows))
    return squares.sqrt_()


def origin(on: str, own: Tensor, broadcast: Tensor) -> Tensor:
    """Return what is taken from a forged vector so that it is an upload.

    Args:
        on: ``"update"`` if it is one, ``"model"`` if it stands for the model that is sent.
        own: Uploads [b, d].
        broadcast: The global model [d].

    Returns:
        Zeros or the global model, in float32 at least, [d].

    Raises:
        ValueError: If it stands for a model, and ``broadcast`` is not of the uploads' length.

    Example:
        >>> origin("update", torch.ones(1, 2), torch.empty(0))
        tensor([0., 0.])
    """
    dtype, numel = merging_dtype(own), own.shape[1]
    if on == "update":
        return own.new_zeros(numel, dtype=dtype)
    if broadcast.shape != (numel,):
        raise ValueError(
            f"Expected `context.broadcast` to be the global model, {numel} numbers, to forge a"
            f" model but got shape {list(broadcast.shape)}."
        )
    return broadcast.to(own.device, dtype)
