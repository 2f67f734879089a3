"""A chain of pre-aggregators with an aggregator at its end."""

from collections.abc import Sequence
from functools import partial
from typing import cast

from torch import Tensor, nn

from pl_fed.aggregators.base import Aggregator, PreAggregator, PreparedUploads
from pl_fed.types import RoundContext


class Chain(Aggregator):
    """Chain: changes the uploads with pre-aggregators in their order, and merges the result.

    The federation builds it from its ``pre_aggregators`` and its ``aggregator``. Its breakdown
    point is the aggregator's, as seen through the pre-aggregators.

    Args:
        first: The pre-aggregators, in the order of their application.
        then: The aggregator that merges their output.

    Shape:
        - ``uploads``: [n, d].
        - ``weights``: [n].
        - output: [d].

    Raises:
        ValueError: If a stage has too few uploads, or a pre-aggregator returns anything but uploads
            with as many weights and clients. If the aggregator remembers clients, and a
            pre-aggregator merges them.

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
        self.shards = then.shards and all(pre_aggregator.shards for pre_aggregator in first)
        self.take_needs(then)
        if then.remembers_clients:
            _check_single_clients(first, then)

    @property
    def final_aggregator(self) -> Aggregator:
        """The aggregator that merges the output of all pre-aggregators."""
        return self.then.final_aggregator

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into one row [d]."""
        self.require_uploads(uploads)
        for pre_aggregator in self.first:
            output = pre_aggregator(uploads, weights, context)
            uploads, weights, context = _check_output(pre_aggregator, output)
        merged: Tensor = self.then(uploads, weights, context)
        return merged

    def sent_numbers(self, numbers: int) -> int:
        """Return how many numbers a client sends, after all pre-aggregators that compress."""
        for pre_aggregator in self.first:
            numbers = cast(PreAggregator, pre_aggregator).sent_numbers(numbers)
        return numbers

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0 if there is a pre-aggregator: its output may lie outside the benign range."""
        return 0 if len(self.first) else self.then.max_byzantine(num_uploads)

    def breakdown(self, num_uploads: int) -> int:
        """Return the aggregator's breakdown, as seen through the pre-aggregators.

        The number combines the general promises of the stages. It ignores that the mean of clipped
        uploads is bounded, too. Each :class:`NearestNeighborMixing` makes the bound three times as
        large.
        """
        breakdown = self.then.breakdown
        for pre_aggregator in reversed(cast(Sequence[PreAggregator], self.first)):
            breakdown = partial(pre_aggregator.breakdown, next_breakdown=breakdown)
        return breakdown(num_uploads)


def _check_single_clients(first: Sequence[PreAggregator], then: Aggregator) -> None:
    """Refuse pre-aggregators that merge clients before an aggregator that remembers them."""
    for pre_aggregator in first:
        if pre_aggregator.merges_clients:
            merging, name = type(pre_aggregator).__name__, type(then.final_aggregator).__name__
            raise ValueError(
                f"Expected `federation.pre_aggregators` to have a row for each client for {name},"
                f" which remembers the uploads of each client, but got {merging}, which merges"
                f" other clients in each round: remove {merging}, or use an aggregator without"
                " such a memory."
            )


def _check_output(pre_aggregator: object, output: object) -> PreparedUploads:
    """Return the output of a pre-aggregator; refuse unequal numbers of rows, weights, clients."""
    if isinstance(output, tuple) and len(output) == 3:
        uploads, weights, context = output
        clients = getattr(context, "clients", ())
        lengths = [
            len(tensor) if isinstance(tensor, Tensor) else None for tensor in (uploads, weights)
        ]
        if None not in lengths and lengths[0] == lengths[1] and len(clients) in (0, lengths[0]):
            return PreparedUploads(uploads, weights, context)
    raise ValueError(
        "Expected argument `pre_aggregators` to return uploads [m, d], weights [m] and the context"
        f" of their m clients but {type(pre_aggregator).__name__} returned {_describe(output)}."
    )


def _describe(output: object) -> str:
    if isinstance(output, Tensor):
        return f"a tensor {list(output.shape)}"
    if isinstance(output, tuple):
        return f"({', '.join(map(_describe, output))})"
    clients = getattr(output, "clients", None)
    return type(output).__name__ if clients is None else f"a context of {len(clients)} clients"
