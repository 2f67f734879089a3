"""Buckets: a noisy sum for each random group of clients, so that robust aggregators keep privacy.

In round t, a keyed draw b(t, k) puts client k in one of B buckets. The server releases B noisy sums
of clipped uploads, and an aggregator works on them as if they were B uploads::

    r_b = (Σ_{k in S_t, b(t, k) = b} min(1, C / ‖Δ_k‖) Δ_k + N_b) / (m / B),    N_b ~ N(0, (z C)² I)

The draw depends on the seed, the round and the client's id alone, and is public. Stack the B sums
to one vector. A client is in one block of it, with a norm of at most C. So the stacked vector
changes by at most C if the client sends nothing, as one sum does, and z has the same cost. With
cohorts of fixed size another client may stand in, possibly in another block: that changes the
vector by at most 2 C. Whatever an aggregator computes from the rows r_b is post-processing.

Source of the random buckets before an aggregator: S. P. Karimireddy, L. He and M. Jaggi,
"Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", ICLR 2022, arXiv 2006.09365.
Departs from the paper: buckets have random sizes and a fixed denominator, because the size of a
bucket depends on the other clients of the cohort.
"""

import torch
from torch import Tensor

from pl_fed.functional.privacy import bucket_sums
from pl_fed.random import integers, key
from pl_fed.types import RoundContext


class Buckets:
    """Buckets: random groups of clients with a noisy sum each.

    Args:
        count: The number of buckets B, at least 2.
        seed: The seed of the federation.

    Example:
        >>> buckets = Buckets(count=4, seed=0)
        >>> clients = torch.tensor([7, 3, 5])
        >>> bool((buckets.assign(clients, 0)[1:] == buckets.assign(clients[1:], 0)).all())
        True
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed

    def assign(self, clients: Tensor, round: int) -> Tensor:
        """Return the bucket of each client, from 0 to B − 1, int64 [clients].

        Args:
            clients: Client ids, int64 [clients].
            round: The round, from 0.
        """
        return integers(key(self.seed, "privacy buckets", round), clients, self.count)

    def sum(self, uploads: Tensor, factors: Tensor, clients: Tensor, round: int) -> Tensor:
        """Return the sum of the clipped uploads of each bucket, without noise, [B, numel].

        Args:
            uploads: The uploads, [clients, numel].
            factors: The factors that clip them, [clients].
            clients: Client ids, int64 [clients].
            round: The round, from 0.
        """
        return bucket_sums(uploads, factors, self.assign(clients, round), self.count)

    @property
    def largest_minority(self) -> int:
        """The largest number of buckets below B / 2."""
        return (self.count - 1) // 2

    def build_context(self, context: RoundContext, num_byzantine: int) -> RoundContext:
        """Return the context for an aggregator of the buckets: released and public values only.

        A bucket is a client with the id of the bucket. Each Byzantine client is in one bucket, so
        the aggregator assumes as many Byzantine buckets as clients. It assumes a minority of the
        buckets at most, because no aggregator works beyond.

        Args:
            context: The context of the round.
            num_byzantine: The number of Byzantine clients that the server expects in a cohort of
                the expected size. The number in the present cohort would tell its size.
        """
        return RoundContext(
            seed=context.seed,
            round=context.round,
            num_byzantine=min(num_byzantine, self.largest_minority),
            clients=torch.arange(self.count),
            num_rounds=context.num_rounds,
            broadcast=context.broadcast,
            layout=context.layout,
            unsent=context.unsent,
            net=context.net,
            note=lambda name, number: context.note(f"{name}_buckets", number),
        )
