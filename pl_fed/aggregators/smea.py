"""SMEA: smallest maximum eigenvalue averaging.

Y. Allouah, R. Guerraoui, N. Gupta, R. Pinot and J. Stephan, "On the Privacy-Robustness-Utility
Trilemma in Distributed Learning", ICML 2023, arXiv 2302.04787::

    S = argmin of the largest eigenvalue of Cov(Δ_k, k in S)   over all S of n − f uploads
    Δ = mean of the uploads in S

Among sets of equal eigenvalue, the first in lexicographic order of the client ids wins.

Departs from the authors' library: it approximates the eigenvalues by one step of the power method
from a random direction. Here they are exact: they come from the n × n products of the uploads.
"""

import itertools
import math

import torch
from torch import Tensor

from pl_fed.aggregators.byzantine_count import ByzantineAwareAggregator
from pl_fed.functional.aggregation import gram_matrix, subset_mean
from pl_fed.functional.selection import complement_mask
from pl_fed.types import RoundContext

_MAX_WORK = 10**9  # subsets × (their size)³, in a few seconds
_BATCH_NUMBERS = 1 << 20  # numbers of one batch of matrices


class SMEA(ByzantineAwareAggregator):
    """Smallest maximum eigenvalue averaging (SMEA): mean of the n − f uploads of least variance.

    The variance of a set is the largest one over all directions. Source: Allouah et al., ICML 2023.
    Breakdown point: f < n / 2, as far as the search is feasible. It logs the f other uploads as
    ``"dropped"``.

    The search visits all sets of n − f uploads: 0.02 s for n = 16 and f = 4, 0.4 s for n = 20 and f
    = 6. SMEA refuses more than 1e9 of work, the number of sets times the cube of their size.

    Args:
        num_byzantine: The assumed number of Byzantine uploads, the paper's f, at least 0. ``None``
            uses the number that the server expects.

    Shape:
        - ``uploads``: [n, d], n at least 2 f + 1.
        - ``weights``: [n]; unused.
        - output: [d].

    Raises:
        ValueError: If ``num_byzantine`` is negative, there are too few uploads or far too many, or
            an upload is not finite.

    Example:
        >>> uploads = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [2.0, 90.0]])
        >>> context = RoundContext(num_byzantine=1, clients=torch.arange(4))
        >>> SMEA()(uploads, torch.ones(4), context)
        tensor([2., 0.])
    """

    shards = True

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into the mean of the set of least variance [d]."""
        byzantine, n = self.resolve_num_byzantine(context), len(uploads)
        self.require_uploads(uploads, 2 * byzantine + 1)
        if _work(n, byzantine) > _MAX_WORK:
            raise ValueError(
                "Expected argument `uploads` to have few rows for SMEA, which visits all sets of"
                f" n − f, but got n = {n} with f = {byzantine}: {math.comb(n, byzantine)} sets."
            )
        by_client = context.clients.to(uploads.device).argsort(stable=True)
        products = context.sum(gram_matrix(uploads, by_client))
        if not products.isfinite().all():
            raise self.overflow_error(uploads)
        subset = least_variance_subset(products.cpu(), n - byzantine)
        selected = by_client[subset.to(by_client.device)]
        context.reject_rows(complement_mask(selected, n))
        return subset_mean(uploads, selected)

    def breakdown(self, num_uploads: int) -> int:
        """Return the largest feasible f below n / 2, at most ``num_byzantine``."""
        maximum = self.limit_breakdown(max(0, (num_uploads - 1) // 2))
        return next(
            f for f in range(maximum, -1, -1) if _work(num_uploads, f) <= _MAX_WORK or f == 0
        )


def least_variance_subset(products: Tensor, count: int) -> Tensor:
    """Return the set of rows with the least variance: the smallest maximum eigenvalue.

    Args:
        products: The Gram matrix of all rows, finite, float64 [n, n].
        count: The number of rows to select, at least 1.

    Returns:
        Positions in ascending order, int64 [count].
    """
    selected, smallest = torch.arange(count), float("inf")
    subsets = itertools.combinations(range(len(products)), count)
    while batch := list(itertools.islice(subsets, max(1, _BATCH_NUMBERS // count**2))):
        rows = torch.tensor(batch)
        part = products[rows[:, :, None], rows[:, None, :]]
        means = part.mean(1, keepdim=True)
        centred = part - means - means.mT + means.mean(2, keepdim=True)
        largest = torch.linalg.eigvalsh(centred)[:, -1]
        best = largest.argmin()
        if largest[best] < smallest:
            selected, smallest = rows[best], float(largest[best])
    return selected


def _work(num_uploads: int, num_excluded: int) -> int:
    return math.comb(num_uploads, num_excluded) * (num_uploads - num_excluded) ** 3
