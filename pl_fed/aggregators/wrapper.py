"""The base class of aggregators that change the result of another aggregator."""

from pl_fed.aggregators.base import Aggregator
from pl_fed.aggregators.mean import Mean
from pl_fed.arguments import check_instances


class AggregatorWrapper(Aggregator):
    """Aggregator wrapper: changes the result of another aggregator. This is the base class.

    Args:
        aggregator: The aggregator that merges the uploads; ``None`` for the uniform mean.

    Raises:
        TypeError: If ``aggregator`` is no aggregator.

    Example:
        >>> import torch
        >>> from pl_fed.types import RoundContext
        >>> class Halved(AggregatorWrapper):
        ...     def forward(self, uploads, weights, context):
        ...         return self.aggregator(uploads, weights, context) / 2
        >>> Halved()(torch.tensor([[1.0], [5.0]]), torch.ones(2), RoundContext())
        tensor([1.5000])
    """

    def __init__(self, aggregator: Aggregator | None = None) -> None:
        super().__init__()
        aggregator = Mean() if aggregator is None else aggregator
        check_instances(Aggregator, aggregator=aggregator)
        self.aggregator = aggregator
        self.take_needs(aggregator)

    @property
    def final_aggregator(self) -> Aggregator:
        """The aggregator that merges the uploads."""
        return self.aggregator.final_aggregator

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: the change may leave the range of the benign uploads."""
        return 0
