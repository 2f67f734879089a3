"""The coordinate-wise trimmed mean.

D. Yin, Y. Chen, K. Ramchandran and P. Bartlett, "Byzantine-Robust Distributed Learning: Towards
Optimal Statistical Rates", ICML 2018, arXiv 1803.01498, Option II::

    Δ_j = mean of Δ_1j, ..., Δ_nj without the b largest and the b smallest   for each coordinate j

Departs from the paper: it trims a share β of the uploads, here it is a number, b = β n.
"""

from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_integers
from pl_fed.functional.aggregation import trimmed_mean
from pl_fed.types import RoundContext


class TrimmedMean(Aggregator):
    """Mean of the uploads in each coordinate, without the largest and the smallest ones.

    Args:
        num_trimmed: How many values are left out at each end, the paper's β n; at least 0. ``None``
            takes the number of byzantine uploads that the server expects.

    Shape:
        - ``uploads``: [n, d], n above twice the number that is trimmed, without NaN.
        - ``weights``: [n]; not read.
        - output: [d].

    Raises:
        ValueError: If ``num_trimmed`` is negative, or there are too few uploads to trim.

    Example:
        >>> import torch
        >>> uploads = torch.tensor([[1.0, 0.0], [3.0, 2.0], [2.0, 4.0], [-1e30, 1e30]])
        >>> TrimmedMean(num_trimmed=1)(uploads, torch.ones(4), RoundContext())
        tensor([1.5000, 3.0000])
    """

    shards = True

    def __init__(self, num_trimmed: int | None = None) -> None:
        super().__init__()
        if num_trimmed is not None:
            check_integers(0, num_trimmed=num_trimmed)
        self.num_trimmed = num_trimmed

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into their trimmed mean [d]."""
        self.require_uploads(uploads)
        n = len(uploads)
        trimmed = context.num_byzantine if self.num_trimmed is None else self.num_trimmed
        if n <= 2 * trimmed:
            raise ValueError(
                f"Expected argument `uploads` to have more than {2 * trimmed} rows, for TrimmedMean"
                f" leaves out {trimmed} values at each end, but got {n}."
            )
        return trimmed_mean(uploads, trimmed)

    def max_byzantine(self, num_uploads: int) -> int:
        """Return ``num_trimmed``; 0 where it is left to the server's expectation."""
        return min(self.num_trimmed or 0, max(0, (num_uploads - 1) // 2))

    def breakdown(self, num_uploads: int) -> int:
        """Return ``num_trimmed``, or all below a half where it is left to the server."""
        most = max(0, (num_uploads - 1) // 2)
        return most if self.num_trimmed is None else min(self.num_trimmed, most)
