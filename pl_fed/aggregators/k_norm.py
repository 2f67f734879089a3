"""k-norm: the mean without the longest uploads.

A baseline of T. Li, S. Hu, A. Beirami and V. Smith, "Ditto: Fair and Robust Federated Learning
Through Personalization", ICML 2021, arXiv 2012.04221, as in Ditto's code::

    Δ = mean of the n − f uploads with the smallest ‖Δ_k‖

Among equal norms, as those of clipped uploads, the mean includes the smallest client ids. Norms
that differ by rounding only are equal.
"""

import torch
from torch import Tensor

from pl_fed.aggregators.byzantine_count import ByzantineAwareAggregator
from pl_fed.functional.aggregation import merging_dtype, squared_norms, subset_mean
from pl_fed.functional.selection import TIE, ascending_order, complement_mask, join_ties
from pl_fed.types import RoundContext


class KNorm(ByzantineAwareAggregator):
    """k-norm: mean of the n − f uploads with the smallest norms.

    Source: a baseline of Ditto (Li et al., ICML 2021). Breakdown point: f < n / 2. It logs the f
    longest uploads as ``"dropped"``.

    Args:
        num_byzantine: The number of uploads to leave out, f, at least 0. ``None`` uses the number
            of Byzantine uploads that the server expects.

    Shape:
        - ``uploads``: [n, d], n at least f + 1.
        - ``weights``: [n]; unused.
        - output: [d], no longer than the longest upload in the mean.

    Raises:
        ValueError: If ``num_byzantine`` is negative, or there are too few uploads.

    Example:
        >>> uploads = torch.tensor([[1.0], [-9.0], [2.0]])
        >>> context = RoundContext(num_byzantine=1, clients=torch.arange(3))
        >>> KNorm()(uploads, torch.ones(3), context)
        tensor([1.5000])
    """

    shards = True

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into the mean of the shortest ones [d]."""
        num_dropped = self.resolve_num_byzantine(context)
        self.require_uploads(uploads, num_dropped + 1)
        tolerance = max(TIE, 8 * torch.finfo(merging_dtype(uploads)).eps)
        norms = join_ties(context.sum(squared_norms(uploads)), tolerance)
        selected = ascending_order(norms, context.clients)[: len(uploads) - num_dropped]
        context.reject_rows(complement_mask(selected, len(uploads)))
        return subset_mean(uploads, selected)

    def breakdown(self, num_uploads: int) -> int:
        """Return the largest f below n / 2, at most ``num_byzantine``.

        The result is no longer than a benign upload, but Byzantine uploads may decide its
        direction.
        """
        return self.limit_breakdown(max(0, (num_uploads - 1) // 2))
