"""Coordinate-wise trimmed mean.

D. Yin, Y. Chen, K. Ramchandran and P. Bartlett, "Byzantine-Robust Distributed Learning: Towards
Optimal Statistical Rates", ICML 2018, arXiv 1803.01498, Option II::

    Δ_j = mean of Δ_1j, ..., Δ_nj without the b largest and the b smallest   for each coordinate j

Departs from the paper: it trims a share β of the uploads; the argument here is the number b = β n.
"""

from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_integers
from pl_fed.functional.aggregation import trimmed_mean
from pl_fed.types import RoundContext


class TrimmedMean(Aggregator):
    """Trimmed mean: coordinate-wise mean without the b largest and the b smallest values.

    Source: Yin et al., ICML 2018, Option II. Breakdown point: f ≤ b with b < n / 2.

    Args:
        num_trimmed: The number of values to leave out at each end, b = β n in the paper, at least
            0. ``None`` uses the number of Byzantine uploads that the server expects.

    Shape:
        - ``uploads``: [n, d], n > 2 b, without NaN.
        - ``weights``: [n]; unused.
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
        """Merge uploads [n, d] into their coordinate-wise trimmed mean [d]."""
        self.require_uploads(uploads)
        n = len(uploads)
        trimmed = context.num_byzantine if self.num_trimmed is None else self.num_trimmed
        if n <= 2 * trimmed:
            raise ValueError(
                f"Expected argument `uploads` to have more than {2 * trimmed} rows, because"
                f" TrimmedMean leaves out {trimmed} values at each end, but got {n}."
            )
        return trimmed_mean(uploads, trimmed)

    def max_byzantine(self, num_uploads: int) -> int:
        """Return ``num_trimmed``, or 0 if the server's expectation replaces it."""
        return min(self.num_trimmed or 0, max(0, (num_uploads - 1) // 2))

    def breakdown(self, num_uploads: int) -> int:
        """Return ``num_trimmed``, or the largest minority if the server's expectation is used."""
        maximum = max(0, (num_uploads - 1) // 2)
        return maximum if self.num_trimmed is None else min(self.num_trimmed, maximum)
