"""The mean around the median.

C. Xie, O. Koyejo and I. Gupta, "Generalized Byzantine-tolerant SGD", arXiv 1802.10116 ("mean around
median")::

    Δ_j = mean of the n − f of Δ_1j, ..., Δ_nj that are nearest to their median   for each j

The paper does not say which value counts where one below the median and one above are equally far
from it, and there is room for one: here it is their mean. For an even n the median is the mean of
the two middle values.
"""

from torch import Tensor

from pl_fed.aggregators.counting import Counting
from pl_fed.functional.aggregation import mean_around_median
from pl_fed.types import RoundContext


class MeaMed(Counting):
    """Mean of the n − f values of each coordinate that are nearest to its median.

    Args:
        num_byzantine: How many values are left out, the paper's q, at least 0. ``None`` takes the
            number of byzantine uploads that the server expects.

    Shape:
        - ``uploads``: [n, d], n at least 2 f + 1, without NaN.
        - ``weights``: [n]; not read.
        - output: [d].

    Raises:
        ValueError: If ``num_byzantine`` is negative, or there are too few uploads.

    Example:
        >>> import torch
        >>> uploads = torch.tensor([[1.0, 0.0], [3.0, 2.0], [4.0, 4.0], [1e30, -1e30]])
        >>> MeaMed(num_byzantine=2)(uploads, torch.ones(4), RoundContext())
        Traceback (most recent call last):
            ...
        ValueError: Expected argument `uploads` to have at least 5 rows for MeaMed but got \
4: a cohort must be larger, or have fewer byzantine clients.
        >>> MeaMed(num_byzantine=1)(uploads, torch.ones(4), RoundContext())
        tensor([2.6667, 2.0000])
    """

    shards = True

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into the mean around their median [d]."""
        byzantine = self.expected(context)
        self.require_uploads(uploads, 2 * byzantine + 1)
        return mean_around_median(uploads, len(uploads) - byzantine)

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: a value as near to the median as an honest one may lie on its other side."""
        return 0

    def breakdown(self, num_uploads: int) -> int:
        """Return all below a half, or ``num_byzantine`` if it is smaller."""
        return self.capped(max(0, (num_uploads - 1) // 2))
