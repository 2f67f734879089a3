"""Bucketing: random groups of clients upload their mean.

S. P. Karimireddy, L. He and M. Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via
Bucketing", ICLR 2022, arXiv 2006.09365, Algorithm 1, with π a random permutation of the clients::

    y_i = mean of Δ_π(s(i−1)+1), ..., Δ_π(min(s i, n))   for i = 1, ..., ⌈n / s⌉

The means are nearer to each other than the uploads, which an aggregator after it needs; a byzantine
client spoils one of them. The permutation is drawn anew each round, by the clients' ids.

What follows sees a bucket as a client that has the samples of all its clients, the mean of their
losses, and the smallest of their ids. The server expects as many byzantine buckets as clients.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pl_fed.aggregators.base import PreAggregator, Prepared
from pl_fed.arguments import check_integers
from pl_fed.functional.aggregation import merging_dtype
from pl_fed.random import generator
from pl_fed.types import RoundContext


class Bucketing(PreAggregator):
    """Merge the uploads in random buckets by their mean.

    Args:
        bucket_size: The paper's s, at least 1; the last bucket may be smaller. With a share δ of
            byzantine clients, s is below δ_max / δ, where δ_max < 1/2 is the share that the
            aggregator can do with.

    Shape:
        - ``uploads``: [n, d], n at least 1.
        - output: [⌈n / s⌉, d]; weights are the buckets' samples, and the context is of as many.

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

    def __init__(self, bucket_size: int = 2) -> None:
        super().__init__()
        check_integers(1, bucket_size=bucket_size)
        self.bucket_size = bucket_size

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Prepared:
        """Merge uploads [n, d] into those of buckets."""
        self.require_uploads(uploads)
        draw = generator(context.seed, "bucketing", context.round)
        ranks = torch.randperm(len(uploads), generator=draw).split(self.bucket_size)
        by_client = context.clients.argsort(stable=True)
        buckets = [by_client[each] for each in ranks]
        rows = uploads.new_empty(len(buckets), uploads.shape[1], dtype=merging_dtype(uploads))
        for row, bucket in zip(rows, buckets):
            torch.mean(uploads[bucket.to(uploads.device)], 0, dtype=rows.dtype, out=row)
        first = by_client[torch.stack([each.min() for each in ranks])]
        context = replace(
            context,
            clients=context.clients[first],
            losses=_pooled(context.losses, buckets, torch.mean),
            start_losses=_pooled(context.start_losses, buckets, torch.mean),
        )
        return Prepared(rows, _pooled(weights, buckets, torch.sum), context)

    def breakdown(self, num_uploads: int, then: Callable[[int], int]) -> int:
        """Return what comes next with as many uploads as there are buckets."""
        return then(-(-num_uploads // self.bucket_size))


def _pooled(numbers: Tensor, buckets: list[Tensor], how: Callable[[Tensor], Tensor]) -> Tensor:
    """Return one number for each bucket; none if there are none for the clients."""
    if not len(numbers):
        return numbers
    return torch.stack([how(numbers[bucket.to(numbers.device)]) for bucket in buckets])
