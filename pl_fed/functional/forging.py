"""Building blocks of the attacks on uploads: statistics of rows, in float32 or wider."""

import torch
from torch import Tensor

from pl_fed.functional.aggregation import merging_dtype
from pl_fed.nets.rows import finite_rows


def reference_rows(honest: Tensor, own: Tensor) -> Tensor:
    """Return the uploads that attackers forge from: the benign uploads, or their own finite ones.

    The attackers use their own uploads if they see no benign uploads.

    Args:
        honest: The benign uploads that the attackers see, [h, d].
        own: The attackers' own uploads, [b, d].

    Example:
        >>> reference_rows(torch.empty(0, 1), torch.tensor([[1.0], [torch.nan]]))
        tensor([[1.]])
    """
    return honest if len(honest) else own[finite_rows(own)]


def mean_row(rows: Tensor) -> Tensor:
    """Return the mean of rows [n, d], in float32 or wider."""
    return rows.mean(0, dtype=merging_dtype(rows))


def standard_deviations(rows: Tensor, mean: Tensor) -> Tensor:
    """Return the population standard deviation of each column.

    Args:
        rows: Shape [n, d].
        mean: The mean of the rows, in the type of the computation, [d].

    Returns:
        Shape [d].

    Example:
        >>> rows = torch.tensor([[1.0], [5.0]])
        >>> standard_deviations(rows, mean_row(rows))
        tensor([2.])
    """
    squares = torch.zeros_like(mean)
    for row in rows:
        difference = row - mean
        squares.addcmul_(difference, difference, value=1 / len(rows))
    return squares.sqrt_()


def perturbation_of(kind: str, rows: Tensor, mean: Tensor) -> Tensor:
    """Return a direction away from the mean of rows.

    Args:
        kind: ``"std"``, the negative standard deviations; ``"sign"``, the negative signs of the
            mean; ``"unit"``, the negative mean.
        rows: Shape [n, d].
        mean: The mean of the rows, in the type of the computation, [d].

    Returns:
        Shape [d].

    Example:
        >>> rows = torch.tensor([[1.0, -2.0], [5.0, -2.0]])
        >>> perturbation_of("sign", rows, mean_row(rows))
        tensor([-1.,  1.])
    """
    if kind == "std":
        return -standard_deviations(rows, mean)
    return -(mean.sign() if kind == "sign" else mean)


def upload_origin(target: str, own: Tensor, broadcast: Tensor) -> Tensor:
    """Return the row to subtract from a forged vector, so that the difference is an upload.

    Args:
        target: ``"update"`` if the vector is an update, ``"model"`` if it is a model.
        own: The attackers' own uploads [b, d].
        broadcast: The global model [d].

    Returns:
        Zeros for an update, the global model for a model, in float32 or wider, [d].

    Raises:
        ValueError: If the vector is a model, and ``broadcast`` does not have the uploads' length.

    Example:
        >>> upload_origin("update", torch.ones(1, 2), torch.empty(0))
        tensor([0., 0.])
    """
    dtype, numel = merging_dtype(own), own.shape[1]
    if target == "update":
        return own.new_zeros(numel, dtype=dtype)
    if broadcast.shape != (numel,):
        raise ValueError(
            f"Expected `context.broadcast` to be the global model, {numel} numbers, to forge a"
            f" model but got shape {list(broadcast.shape)}."
        )
    return broadcast.to(own.device, dtype)
