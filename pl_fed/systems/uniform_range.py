"""Uniform range: all numbers between two limits are equally likely."""

from torch import Tensor

from pl_fed.arguments import check_nonnegative
from pl_fed.systems.base import Distribution


class UniformRange(Distribution):
    """Uniform range: draws each client's number uniformly between two limits.

    Args:
        low: The lower limit, at least 0.
        high: The upper limit, at least ``low``.

    Shape:
        shares [clients] → float64 [clients].

    Raises:
        TypeError: If a limit is not a number.
        ValueError: If a limit is negative or infinite, or ``high`` is below ``low``.

    Example:
        >>> import torch
        >>> UniformRange(1.0, 3.0).quantiles(torch.tensor([0.5], dtype=torch.float64)).tolist()
        [2.0]
    """

    def __init__(self, low: float, high: float) -> None:
        check_nonnegative(low=low, high=high)
        if high < low:
            raise ValueError(
                f"Expected argument `high` to be at least `low` = {low} but got {high}: exchange"
                " them."
            )
        self.low = float(low)
        self.high = float(high)

    def quantiles(self, shares: Tensor) -> Tensor:
        """Return low + share · (high − low)."""
        return self.low + shares.double() * (self.high - self.low)
