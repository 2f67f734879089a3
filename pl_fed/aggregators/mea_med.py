"""MeaMed: the mean around the median.

C. Xie, O. Koyejo and I. Gupta, "Generalized Byzantine-tolerant SGD", arXiv 1802.10116 ("mean around
median")::

    Δ_j = mean of the n − f of Δ_1j, ..., Δ_nj that are nearest to their median   for each j

The paper leaves one case open. If one value below the median and one above are equally far from
it, and only one of them can enter the mean, here their mean enters. For an even n, the median is
the mean of the two middle values.
"""

from torch import Tensor

from pl_fed.aggregators.byzantine_count import ByzantineAwareAggregator
from pl_fed.functional.aggregation import mean_around_median
from pl_fed.types import RoundContext


class MeaMed(ByzantineAwareAggregator):
    """Mean around the median (MeaMed): mean of the n − f values nearest to the median.

    The medians and means are coordinate-wise. Source: Xie et al., arXiv 1802.10116. Breakdown
    point: f < n / 2.

    Args:
        num_byzantine: The number of values to leave out, the paper's q, at least 0. ``None`` uses
            the number of Byzantine uploads that the server expects.

    Shape:
        - ``uploads``: [n, d], n at least 2 f + 1, without NaN.
        - ``weights``: [n]; unused.
        - output: [d].

    Raises:
        ValueError: If ``num_byzantine`` is negative, or there are too few uploads.

    Example:
        >>> import torch
        >>> uploads = torch.tensor([[1.0, 0.0], [3.0, 2.0], [4.0, 4.0], [1e30, -1e30]])
        >>> MeaMed(num_byzantine=1)(uploads, torch.ones(4), RoundContext())
        tensor([2.6667, 2.0000])
    """

    shards = True

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into the mean around their median [d]."""
        byzantine = self.resolve_num_byzantine(context)
        self.require_uploads(uploads, 2 * byzantine + 1)
        return mean_around_median(uploads, len(uploads) - byzantine)

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: a Byzantine value near the median may lie beyond all benign values."""
        return 0

    def breakdown(self, num_uploads: int) -> int:
        """Return the largest f below n / 2, at most ``num_byzantine``."""
        return self.limit_breakdown(max(0, (num_uploads - 1) // 2))
