"""Base classes of the aggregators that assume a number of Byzantine uploads."""

from torch import nn

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_integers
from pl_fed.types import RoundContext


class ByzantineCount(nn.Module):
    """Mixin with the assumed number of Byzantine uploads: the papers' f.

    Args:
        num_byzantine: The assumed number of Byzantine uploads, at least 0. ``None`` uses the number
            that the server expects among the uploads of the round.

    Raises:
        ValueError: If ``num_byzantine`` is negative.

    Example:
        >>> ByzantineCount().resolve_num_byzantine(RoundContext(num_byzantine=2))
        2
        >>> ByzantineCount(num_byzantine=1).resolve_num_byzantine(RoundContext(num_byzantine=2))
        1
    """

    def __init__(self, num_byzantine: int | None = None) -> None:
        super().__init__()
        if num_byzantine is not None:
            check_integers(0, num_byzantine=num_byzantine)
        self.num_byzantine = num_byzantine

    def resolve_num_byzantine(self, context: RoundContext) -> int:
        """Return f, the assumed number of Byzantine uploads in this round."""
        return context.num_byzantine if self.num_byzantine is None else self.num_byzantine

    def limit_breakdown(self, maximum: int) -> int:
        """Return the smaller one of ``maximum`` and ``num_byzantine``, if the latter is set."""
        return maximum if self.num_byzantine is None else min(self.num_byzantine, maximum)


class ByzantineAwareAggregator(ByzantineCount, Aggregator):
    """Base class of the aggregators that assume a number of Byzantine uploads, the papers' f.

    Args:
        num_byzantine: The assumed number of Byzantine uploads, at least 0. ``None`` uses the number
            that the server expects among the uploads of the round.

    Raises:
        ValueError: If ``num_byzantine`` is negative.

    Example:
        >>> import torch
        >>> class Shortest(ByzantineAwareAggregator):
        ...     def forward(self, uploads, weights, context):
        ...         self.require_uploads(uploads, self.resolve_num_byzantine(context) + 1)
        ...         return uploads[uploads.norm(dim=1).argmin()].clone()
        ...
        ...     def breakdown(self, num_uploads):
        ...         return self.limit_breakdown(max(0, (num_uploads - 1) // 2))
        >>> Shortest(num_byzantine=1)(torch.tensor([[1.0], [2.0]]), torch.ones(2), RoundContext())
        tensor([1.])
        >>> Shortest(num_byzantine=1).breakdown(9)
        1
    """

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: the aggregator cannot tell a forged upload near the benign ones from these."""
        return 0
