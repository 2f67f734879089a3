"""Log-normal distribution: the logarithm is normal, so that a few clients are far from the median.

F. Lai et al., "FedScale: Benchmarking model and system performance of federated learning at scale",
ICML 2022, arXiv 2105.11367: speeds and bandwidths of phones differ by orders of magnitude.
"""

import torch
from torch import Tensor

from pl_fed.arguments import check_nonnegative, check_positive
from pl_fed.systems.base import Distribution


class LogNormal(Distribution):
    """Log-normal distribution: median · exp(σ z) with standard normal z.

    Args:
        median: The median, above 0.
        sigma: σ ≥ 0, the standard deviation of the logarithm. With σ = 1, the 90 % quantile is 13
            times the 10 % quantile.

    Shape:
        shares [clients] → float64 [clients].

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If ``median`` is not above 0, or ``sigma`` is negative.

    Example:
        >>> LogNormal(10.0, 1.0).quantiles(torch.tensor([0.5], dtype=torch.float64)).tolist()
        [10.0]
    """

    def __init__(self, median: float, sigma: float = 1.0) -> None:
        check_positive(median=median)
        check_nonnegative(sigma=sigma)
        self.median = float(median)
        self.sigma = float(sigma)

    def quantiles(self, shares: Tensor) -> Tensor:
        """Return median · exp(σ Φ⁻¹(share))."""
        z: Tensor = torch.special.ndtri(shares.double())
        return self.median * (self.sigma * z).exp()
