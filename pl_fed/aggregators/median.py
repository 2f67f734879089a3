"""Coordinate-wise median.

D. Yin, Y. Chen, K. Ramchandran and P. Bartlett, "Byzantine-Robust Distributed Learning: Towards
Optimal Statistical Rates", ICML 2018, arXiv 1803.01498, Option I::

    Δ_j = median(Δ_1j, ..., Δ_nj)   for each coordinate j

For an even n, the median is the mean of the two middle values, as in the paper and in numpy
(Ditto's code). ``torch.median`` returns the lower one.
"""

from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.functional.aggregation import coordinate_median
from pl_fed.types import RoundContext


class Median(Aggregator):
    """Coordinate-wise median of the uploads, independent of the clients' sizes.

    Source: Yin et al., ICML 2018, Option I. Breakdown point: f < n / 2.

    Shape:
        - ``uploads``: [n, d], n at least 1, without NaN.
        - ``weights``: [n]; unused.
        - output: [d].

    Raises:
        ValueError: If there is no upload.

    Example:
        >>> import torch
        >>> uploads = torch.tensor([[1.0, 0.0], [2.0, 0.0], [1e30, 6.0]])
        >>> Median()(uploads, torch.ones(3), RoundContext())
        tensor([2., 0.])
    """

    shards = True

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into their coordinate-wise median [d]."""
        self.require_uploads(uploads)
        return coordinate_median(uploads)

    def max_byzantine(self, num_uploads: int) -> int:
        """Return the largest minority, ⌊(n − 1) / 2⌋."""
        return max(0, (num_uploads - 1) // 2)
