"""Bulyan: a mean around the median of the uploads that Krum selects.

E. M. El Mhamdi, R. Guerraoui and S. Rouault, "The Hidden Vulnerability of Distributed Learning in
Byzantium", ICML 2018, arXiv 1802.07927, on top of Krum::

    S = {}                       θ = n − 2 f times:
        k = Krum's choice among the uploads that are not in S;   S = S ∪ {k}
    Δ_j = mean of the θ − 2 f values of coordinate j in S that are nearest to their median

Krum uses r − f − 2 neighbours if r uploads remain. In the last steps this number is below 1, and
Krum uses one neighbour. Ties are resolved as in :class:`~pl_fed.aggregators.Krum` and in
:func:`~pl_fed.functional.aggregation.mean_around_median`.

Departs from the paper: for an even θ the median is the mean of the two middle values, where the
paper takes one of them.
"""

from torch import Tensor

from pl_fed.aggregators.byzantine_count import ByzantineAwareAggregator
from pl_fed.functional.aggregation import gram_matrix, mean_around_median, squared_distances
from pl_fed.functional.selection import complement_mask, select_by_krum
from pl_fed.types import RoundContext


class Bulyan(ByzantineAwareAggregator):
    """Bulyan: mean around the coordinate-wise median of the uploads that Krum selects.

    Source: El Mhamdi et al., ICML 2018. Breakdown point: f ≤ (n − 3) / 4. It logs the 2 f uploads
    that Krum does not select as ``"dropped"``.

    Args:
        num_byzantine: The assumed number of Byzantine uploads, the paper's f, at least 0. ``None``
            uses the number that the server expects.

    Shape:
        - ``uploads``: [n, d], n at least 4 f + 3, without NaN.
        - ``weights``: [n]; unused.
        - output: [d].

    Raises:
        ValueError: If ``num_byzantine`` is negative, or there are too few uploads.

    Example:
        >>> import torch
        >>> uploads = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [9.0], [90.0]])
        >>> context = RoundContext(num_byzantine=1, clients=torch.arange(7))
        >>> Bulyan()(uploads, torch.ones(7), context)
        tensor([3.])
    """

    shards = True

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into the mean around the median of the selected ones [d]."""
        byzantine = self.resolve_num_byzantine(context)
        self.require_uploads(uploads, 4 * byzantine + 3)
        by_client = context.clients.to(uploads.device).argsort(stable=True)
        distances = squared_distances(context.sum(gram_matrix(uploads, by_client)))
        num_selected = len(uploads) - 2 * byzantine
        selected = by_client[select_by_krum(distances, byzantine, num_selected)]
        context.reject_rows(complement_mask(selected, len(uploads)))
        return mean_around_median(uploads, num_selected - 2 * byzantine, selected)

    def breakdown(self, num_uploads: int) -> int:
        """Return the largest f with n ≥ 4 f + 3, at most ``num_byzantine``."""
        return self.limit_breakdown(max(0, (num_uploads - 3) // 4))
