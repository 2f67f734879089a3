"""A trial of an aggregator before training and before a small cohort, on short random uploads."""

from collections.abc import Callable
from dataclasses import replace

import torch
from lightning.pytorch.utilities import rank_zero_warn

from pl_fed.aggregators import Aggregator
from pl_fed.preflight.memory_trial import check_aggregator_memory, read_attributes
from pl_fed.privacy.buckets import Buckets
from pl_fed.types import RoundContext


def try_aggregator(
    aggregator: Aggregator,
    context: RoundContext,
    build: Callable[[], Aggregator] | None = None,
) -> None:
    """Try an aggregator on short random uploads of a cohort.

    Args:
        aggregator: An aggregator without memory of any round.
        context: The context of a round.
        build: Returns further ones, to try the memory of an aggregator that changes attributes.

    Other errors than the one below are ignored, because some aggregators work on real uploads only.

    Raises:
        ValueError: If the aggregator does not fit the number of clients, and says so in a sentence
            that begins with "Expected argument"; or if a checkpoint lacks a part of its memory.
    """
    attributes = read_attributes(aggregator)
    n, draw = len(context.clients), torch.Generator().manual_seed(0)
    losses, root = torch.rand(n, generator=draw), torch.randn(64, generator=draw)
    context = replace(context, losses=losses, start_losses=losses, root=root, broadcast=root)
    try:
        aggregator(torch.randn(n, 64, generator=draw), torch.ones(n, dtype=torch.int64), context)
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("Expected argument"):
            raise
        return
    if build is not None and read_attributes(aggregator) != attributes:
        check_aggregator_memory(build, context)


def try_buckets(buckets: Buckets, aggregator: Aggregator, context: RoundContext) -> None:
    """Try an aggregator on as many rows as there are buckets, and warn of too few buckets.

    Args:
        buckets: The buckets.
        aggregator: An aggregator without memory of any round.
        context: The context of a cohort of the expected size.

    Raises:
        ValueError: If the aggregator or its arguments do not fit the number of buckets.
    """
    minority, num_byzantine = buckets.largest_minority, context.num_byzantine
    if num_byzantine > minority:
        rank_zero_warn(
            f"`federation.privacy.buckets` = {buckets.count} is below {2 * num_byzantine + 1} for"
            f" {num_byzantine} expected Byzantine clients in a cohort: they may reach half of the"
            f" buckets, where no aggregator works; it assumes {minority} Byzantine buckets."
        )
    try:
        try_aggregator(aggregator, buckets.build_context(context, num_byzantine))
    except ValueError as error:
        raise ValueError(
            f"{str(error).rstrip('.')}; the rows are the sums of `federation.privacy.buckets` ="
            f" {buckets.count}."
        ) from error
