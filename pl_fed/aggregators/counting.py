"""What those have in common that count with a number of byzantine uploads."""

from torch import nn

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_integers
from pl_fed.types import RoundContext


class Expecting(nn.Module):
    """A number of byzantine uploads to count with, the papers' f: given, or the server's.

    Args:
        num_byzantine: How many, at least 0. ``None`` takes the number that the server expects among
            those that it merges.

    Raises:
        ValueError: If ``num_byzantine`` is negative.

    Example:
        >>> Expecting().expected(RoundContext(num_byzantine=2))
        2
        >>> Expecting(num_byzantine=1).expected(RoundContext(num_byzantine=2))
        1
    """

    def __init__(self, num_byzantine: int | None = None) -> None:
        super().__init__()
        if num_byzantine is not None:
            check_integers(0, num_byzantine=num_byzantine)
        self.num_byzantine = num_byzantine

    def expected(self, context: RoundContext) -> int:
        """Return f in this round."""
        return context.num_byzantine if self.num_byzantine is None else self.num_byzantine

    def capped(self, most: int) -> int:
        """Return ``most``, or ``num_byzantine`` if it is smaller."""
        return most if self.num_byzantine is None else min(self.num_byzantine, most)


class Counting(Expecting, Aggregator):
    """An aggregator that counts with a number of byzantine uploads, the papers' f.

    Args:
        num_byzantine: How many byzantine uploads to count with, at least 0. ``None`` takes the
            number that the server expects among those that it merges.

    Raises:
        ValueError: If ``num_byzantine`` is negative.

    Example:
        >>> import torch
        >>> class Shortest(Counting):
        ...     def forward(self, uploads, weights, context):
        ...         self.require_uploads(uploads, self.expected(context) + 1)
        ...         return uploads[uploads.norm(dim=1).argmin()].clone()
        ...
        ...     def breakdown(self, num_uploads):
        ...         return self.capped(max(0, (num_uploads - 1) // 2))
        >>> Shortest(num_byzantine=1)(torch.tensor([[1.0], [2.0]]), torch.ones(2), RoundContext())
        tensor([1.])
        >>> Shortest(num_byzantine=1).breakdown(9)
        1
    """

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: a forged upload near the honest ones is taken for one of them."""
        return 0
