"""FedMGDA+: the common descent direction nearest to the mean.

Z. Hu, K. Shaloudegi, G. Zhang and Y. Yu, "FedMGDA+: Federated Learning Meets Multi-Objective
Optimization", arXiv 2006.11489, Algorithm 1::

    g_k = Δ_k / ‖Δ_k‖
    λ = argmin ‖Σ_k λ_k g_k‖²   over   Σ_k λ_k = 1,  λ ≥ 0,  |λ_k − 1/n| ≤ ε
    Δ = Σ_k λ_k g_k

Without the last bound, the minimum is the point of the convex hull of the g_k nearest to 0. If this
point is not 0, it decreases the loss of every client, to first order. ‖Δ‖ is at most 1. Therefore
the learning rate of the server optimizer is the paper's global step size.

The quadratic program is solved on the n × n products of the uploads. These add up over slices of
the coordinates.
"""

import math

import torch
from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.functional.aggregation import gram_matrix, merging_dtype, weighted_sum
from pl_fed.functional.min_norm import min_norm_weights
from pl_fed.types import RoundContext


class FedMGDA(Aggregator):
    """FedMGDA+: the shortest combination of the normalised uploads, with weights near 1/n.

    Source: Hu et al., arXiv 2006.11489, Algorithm 1. Breakdown point: 0. An upload of 0 stays 0.
    With a large ``epsilon`` it stops the federation, because the loss of this client cannot
    decrease.

    Args:
        epsilon: ε ≥ 0, the largest difference between a weight and 1/n. 0 gives the mean of the
            normalised uploads; 1 and more allow any weights.

    Shape:
        - ``uploads``: [n, d], n at least 1.
        - ``weights``: [n]; unused.
        - output: [d], of norm at most 1.

    Raises:
        ValueError: If ``epsilon`` is negative or NaN, or there is no upload.

    Example:
        >>> import torch
        >>> uploads = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 4.0]])
        >>> FedMGDA(epsilon=0.0)(uploads, torch.ones(3), RoundContext())
        tensor([0.3333, 0.6667])
        >>> FedMGDA(epsilon=1.0)(uploads, torch.ones(3), RoundContext())
        tensor([0.5000, 0.5000])
    """

    shards = True

    def __init__(self, epsilon: float = 0.1) -> None:
        super().__init__()
        if not 0 <= epsilon <= math.inf:
            raise ValueError(f"Expected argument `epsilon` to be at least 0 but got {epsilon}.")
        self.epsilon = epsilon

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into their shortest combination [d]."""
        self.require_uploads(uploads)
        products = context.sum(gram_matrix(uploads))
        if not products.isfinite().all():
            raise self.overflow_error(uploads)
        norms = products.diagonal().sqrt()
        scale = torch.where(norms > 0, 1 / norms, 0)
        n = len(uploads)
        low, high = max(0.0, 1 / n - self.epsilon), min(1.0, 1 / n + self.epsilon)
        shares = min_norm_weights(scale[:, None] * products * scale, low, high)
        largest = torch.finfo(merging_dtype(uploads)).max  # for uploads with a norm near 0
        return weighted_sum(uploads, (shares * scale).clamp(max=largest))

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: an upload has norm at most 1 in the result, but any direction."""
        return 0
