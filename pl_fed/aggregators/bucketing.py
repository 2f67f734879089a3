"""Bucketing: replace random groups of uploads by their means.

S. P. Karimireddy, L. He and M. Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via
Bucketing", ICLR 2022, arXiv 2006.09365, Algorithm 1, with π a random permutation of the clients::

    y_i = mean of Δ_π(s(i−1)+1), ..., Δ_π(min(s i, n))   for i = 1, ..., ⌈n / s⌉

The means lie closer together than the uploads, as the next aggregator requires. A Byzantine client
changes one mean only. Every round draws a new permutation of the client ids.

For the next stage, a bucket is a client with the samples of all its members. Its losses are the
mean losses of its members, its counts by group are their sums, and its id is their smallest id. The
server expects as many Byzantine buckets as Byzantine clients. If the aggregator leaves out a
bucket, it rejects no single client.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pl_fed.aggregators.base import PreAggregator, PreparedUploads
from pl_fed.arguments import check_integers
from pl_fed.devices import to_device
from pl_fed.functional.aggregation import merging_dtype
from pl_fed.random import generator
from pl_fed.types import RoundContext


class Bucketing(PreAggregator):
    """Bucketing: replaces random groups of s uploads by their means.

    Source: Karimireddy et al., ICLR 2022, Algorithm 1.

    Args:
        bucket_size: The paper's s, at least 1; the last bucket may be smaller. For a share δ of
            Byzantine clients, choose s below δ_max / δ, where δ_max < 1/2 is the share that the
            aggregator tolerates.

    Shape:
        - ``uploads``: [n, d], n at least 1.
        - output: [⌈n / s⌉, d], with the samples of the buckets as weights and a context of the
          buckets.

    Raises:
        ValueError: If ``bucket_size`` is below 1, or there is no upload.

    Example:
        >>> uploads = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
        >>> context = RoundContext(clients=torch.arange(4))
        >>> Bucketing(bucket_size=2)(uploads, torch.ones(4), context)[:2]
        (tensor([[4.5000],
                [3.0000]]), tensor([2., 2.]))
    """

    shards = True
    merges_clients = True

    def __init__(self, bucket_size: int = 2) -> None:
        super().__init__()
        check_integers(1, bucket_size=bucket_size)
        self.bucket_size = bucket_size

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> PreparedUploads:
        """Merge uploads [n, d] into the means of buckets [⌈n / s⌉, d]."""
        self.require_uploads(uploads)
        draw = generator(context.seed, "bucketing", context.round)
        ranks = torch.randperm(len(uploads), generator=draw)
        by_client = context.clients.argsort(stable=True)
        order, size = by_client[ranks], self.bucket_size
        buckets = to_device(order, like=uploads).split(size)
        rows = uploads.new_empty(len(buckets), uploads.shape[1], dtype=merging_dtype(uploads))
        for row, bucket in zip(rows, buckets):
            torch.mean(uploads[bucket], 0, dtype=rows.dtype, out=row)
        first = by_client[torch.stack([part.min() for part in ranks.split(size)])]
        context = replace(
            context.mix_clients(),
            clients=context.clients[first],
            losses=_pool(context.losses, order, size, torch.mean),
            start_losses=_pool(context.start_losses, order, size, torch.mean),
            group_counts=_pool(context.group_counts, order, size, lambda counts: counts.sum(0)),
        )
        return PreparedUploads(rows, _pool(weights, order, size, torch.sum), context)

    def breakdown(self, num_uploads: int, next_breakdown: Callable[[int], int]) -> int:
        """Return the next stage's breakdown for ⌈n / s⌉ uploads."""
        return next_breakdown(-(-num_uploads // self.bucket_size))


def _pool(values: Tensor, order: Tensor, size: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce the clients' values to one value for each bucket; an empty tensor stays empty.

    Args:
        values: One value or row for each upload, [n, ...].
        order: The uploads, bucket after bucket, int64 [n].
        size: The uploads of a bucket.
        reduce: Reduces the values of a bucket.
    """
    if not len(values):
        return values
    buckets = to_device(order, like=values).split(size)
    return torch.stack([reduce(values[bucket]) for bucket in buckets])
