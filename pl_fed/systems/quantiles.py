"""Quantiles: a distribution that is measured, and published as a few numbers."""

import torch
from torch import Tensor

from pl_fed.arguments import check_nonnegative
from pl_fed.systems.base import Distribution


class Quantiles(Distribution):
    """Quantiles: draws from given quantiles, with straight lines between them.

    Args:
        values: At least two numbers in ascending order, at least 0: the quantiles at equally spaced
            shares from 0 to 1. Five numbers are minimum, quartiles and maximum.

    Shape:
        shares [clients] → float64 [clients].

    Raises:
        TypeError: If ``values`` is not a list of numbers.
        ValueError: If there are fewer than two, one is negative or infinite, or the order is wrong.

    Example:
        >>> quartiles = Quantiles([1.0, 2.0, 4.0, 8.0, 40.0])
        >>> quartiles.quantiles(torch.tensor([0.5, 0.625], dtype=torch.float64)).tolist()
        [4.0, 6.0]
    """

    def __init__(self, values: list[float]) -> None:
        if not isinstance(values, list | tuple):
            raise TypeError(
                f"Expected argument `values` to be a list of numbers but got {values!r}: give, for"
                " example, [1, 2, 4, 8]."
            )
        for place, value in enumerate(values):
            check_nonnegative(**{f"values[{place}]": value})
        if len(values) < 2 or sorted(values) != list(values):
            raise ValueError(
                "Expected argument `values` to be at least two numbers in ascending order but got"
                f" {list(values)}: give, for example, [1, 2, 4, 8]."
            )
        self.values = [float(value) for value in values]

    def quantiles(self, shares: Tensor) -> Tensor:
        """Return the quantiles by linear interpolation."""
        values = torch.tensor(self.values, dtype=torch.float64)
        places = shares.double() * (len(values) - 1)
        below = places.floor().long().clamp(max=len(values) - 2)
        return values[below] + (places - below) * (values[below + 1] - values[below])
