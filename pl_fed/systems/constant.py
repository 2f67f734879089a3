"""Constant: all clients are equal."""

import torch
from torch import Tensor

from pl_fed.arguments import check_nonnegative
from pl_fed.systems.base import Distribution


class Constant(Distribution):
    """Constant: gives all clients the same number; a plain number in a config means the same.

    Args:
        value: The number, at least 0.

    Shape:
        shares [clients] → float64 [clients].

    Raises:
        TypeError: If ``value`` is not a number.
        ValueError: If it is negative or infinite.

    Example:
        >>> Constant(3.0).quantiles(torch.tensor([0.2, 0.7])).tolist()
        [3.0, 3.0]
    """

    def __init__(self, value: float) -> None:
        check_nonnegative(value=value)
        self.value = float(value)

    def quantiles(self, shares: Tensor) -> Tensor:
        """Return the number for each client."""
        return torch.full(shares.shape, self.value, dtype=torch.float64)
