"""Tilted mean: the aggregator of FedTilt's server.

B. Zhang, L. Mares De La Cruz and B. Wang, "FedTilt: Towards Multi-Level Fairness-Preserving and
Robust Federated Learning", arXiv 2503.13537, equation 10 and ServerUpdate of Algorithm 1. From w^t,
E₂ gradient steps of size η₃ on::

    G(w) = (1/q) log( (1/n) Σ_k e^{q dist(w, w_k)} ),   ∇G(w) = Σ_k s_k ∇dist(w, w_k),

where s is the softmax of q · dist. A positive q gives larger weights to clients that are far away,
a negative q to clients that are near.

Departs from the paper. It states neither E₂ nor η₃, and calls dist Euclidean. Here:

- dist(w, w_k) = ‖w − w_k‖², as in the paper's proof of Proposition 1. Then one step of η₃ = 1/2 at
  q = 0 gives the mean; these are the defaults.
- q is in units of 1 / mean_k ‖w^t − w_k‖². It acts on distances relative to their mean at w^t, and
  the largest relative distance is at most n. Plain squared distances grow with the number of
  parameters and decrease during training. They would put all weight on one client, or give all
  clients equal weights.

All iterates lie in the span of the uploads, so the steps are computed on the n × n products of the
uploads.
"""

import math

from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_integers, check_positive
from pl_fed.functional.aggregation import gram_matrix, merging_dtype, weighted_sum
from pl_fed.functional.tilted import tilted_weights
from pl_fed.types import RoundContext


class TiltedMean(Aggregator):
    """Tilted mean: moves w by the tilted mean of its squared distances to the clients' models.

    Source: FedTilt (Zhang et al., arXiv 2503.13537), equation 10. Breakdown point: 0. With other
    steps than the defaults, w stops on its way: then n equal uploads do not give this upload.

    Args:
        q: The tilt, any number. 0 is the mean. ∞ follows the farthest client alone: many small
            steps lead to the centre of the smallest ball around all clients. −∞ follows the nearest
            client.
        steps: E₂, at least 1.
        lr: η₃ > 0; 1/2 moves to the weighted mean of the uploads in one step.

    Shape:
        - ``uploads``: [n, d], n at least 1.
        - ``weights``: [n]; unused.
        - output: [d].

    Raises:
        ValueError: If an argument is out of range, or there is no upload.

    Example:
        >>> import torch
        >>> uploads = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> TiltedMean()(uploads, torch.ones(2), RoundContext())
        tensor([0.5000, 1.0000])
        >>> TiltedMean(q=2.0)(uploads, torch.ones(2), RoundContext())
        tensor([0.0832, 1.8337])
    """

    shards = True

    def __init__(self, q: float = 0.0, steps: int = 1, lr: float = 0.5) -> None:
        super().__init__()
        check_integers(1, steps=steps)
        if math.isnan(q):
            raise ValueError(f"Expected argument `q` to be a number but got {q}.")
        check_positive(lr=lr)
        self.q = q
        self.steps = steps
        self.lr = lr

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into the point that the steps from 0 reach [d]."""
        self.require_uploads(uploads)
        if self.q == 0:
            moved = 1 - (1 - 2 * self.lr) ** self.steps
            return moved * uploads.mean(dim=0, dtype=merging_dtype(uploads))
        products = context.sum(gram_matrix(uploads))
        norms = products.diagonal()
        unit = norms.mean()
        coefficients = norms.new_zeros(len(uploads))  # of the uploads in w − w^t
        for _ in range(self.steps):
            along = products @ coefficients
            distances = (coefficients @ along - 2 * along + norms).clamp(min=0)
            shares = tilted_weights(distances / unit if unit > 0 else distances, self.q)
            coefficients = coefficients + 2 * self.lr * (shares - coefficients)
        return weighted_sum(uploads, coefficients)

    def mass(self, weights: Tensor) -> float | None:
        """Return the number of clients at q = 0."""
        return len(weights) if self.q == 0 else None

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: one upload can move the result anywhere, for q < 0 one near w^t."""
        return 0
