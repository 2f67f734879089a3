"""Pre-aggregations, one after the other, and then an aggregator."""

from collections.abc import Sequence
from functools import partial
from typing import cast

from torch import Tensor, nn

from pl_fed.aggregators.base import Aggregator, PreAggregator, Prepared
from pl_fed.types import RoundContext


class Chain(Aggregator):
    """Change the uploads by some pre-aggregators, in their order, and merge what comes out.

    The federation makes it of its ``pre_aggregators``.

    Args:
        first: What changes the uploads.
        then: What merges them.

    Shape:
        - ``uploads``: [n, d].
        - ``weights``: [n].
        - output: [d].

    Raises:
        ValueError: If one of them has too few uploads.

    Example:
        >>> import torch
        >>> from pl_fed.aggregators import Clipping, Mean
        >>> uploads = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 10.0]])
        >>> Chain([Clipping()], Mean())(uploads, torch.ones(3), RoundContext())
        tensor([0.3333, 0.6667])
    """

    def __init__(self, first: Sequence[PreAggregator], then: Aggregator) -> None:
        super().__init__()
        self.first = nn.ModuleList(first)
        self.then = then
        self.shards = then.shards and all(each.shards for each in first)
        self.needs_start_losses = then.needs_start_losses
        self.needs_root = then.needs_root

    @property
    def last(self) -> Aggregator:
        """What merges what comes out."""
        return self.then.last

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into one row [d]."""
        self.require_uploads(uploads)
        for step in self.first:
            uploads, weights, context = _prepared(step, step(uploads, weights, context))
        merged: Tensor = self.then(uploads, weights, context)
        return merged

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: what comes out of a pre-aggregation may lie outside the honest range."""
        return 0 if len(self.first) else self.then.max_byzantine(num_uploads)

    def breakdown(self, num_uploads: int) -> int:
        """Return what the aggregator stands, seen through the pre-aggregations.

        It is what can be said of any of them: that the mean of clipped uploads is bounded, too,
        does not count. Each :class:`NearestNeighborMixing` makes the bound three times as large.
        """
        stands = self.then.breakdown
        for step in reversed(cast(Sequence[PreAggregator], self.first)):
            stands = partial(step.breakdown, then=stands)
        return stands(num_uploads)


def _prepared(step: object, given: object) -> Prepared:
    """Return what a pre-aggregator gave, if it is as many uploads, weights and clients."""
    if isinstance(given, tuple) and len(given) == 3:
        uploads, weights, context = given
        clients = getattr(context, "clients", ())
        lengths = [len(each) if isinstance(each, Tensor) else None for each in (uploads, weights)]
        if None not in lengths and lengths[0] == lengths[1] and len(clients) in (0, lengths[0]):
            return Prepared(uploads, weights, context)
    raise ValueError(
        "Expected argument `pre_aggregators` to give uploads [m, d], weights [m] and the context of"
        f" their m clients but {type(step).__name__} gave {_described(given)}."
    )


def _described(given: object) -> str:
    if isinstance(given, Tensor):
        return f"a tensor {list(given.shape)}"
    if isinstance(given, tuple):
        return f"({', '.join(map(_described, given))})"
    clients = getattr(given, "clients", None)
    return type(given).__name__ if clients is None else f"a context of {len(clients)} clients"
