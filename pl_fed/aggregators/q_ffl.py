"""q-FFL by q-FedAvg: give clients with larger losses larger weights and smaller steps.

T. Li, M. Sanjabi, A. Beirami and V. Smith, "Fair Resource Allocation in Federated Learning", ICLR
2020, arXiv 1905.10497. The objective is Σ_k F_k^{q+1} / (q + 1). Algorithm 2, in the paper's
signs::

    Δw_k = L (w^t − w_k),   Δ_k = F_k^q Δw_k,   h_k = q F_k^{q−1} ‖Δw_k‖² + L F_k^q
    w^{t+1} = w^t − Σ_k Δ_k / Σ_k h_k

With u_k = w_k − w^t and s_k = F_k^q / Σ_j F_j^q, one factor L cancels, and no power overflows::

    Δ = Σ_k s_k u_k / Σ_k s_k (1 + q L ‖u_k‖² / F_k)

F_k is the loss of w^t over all training data of client k.
"""

from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_nonnegative, check_positive
from pl_fed.functional.aggregation import merging_dtype, squared_norms, weighted_sum
from pl_fed.functional.tilted import tilted_weights
from pl_fed.types import RoundContext

_SMALLEST_LOSS = 1e-10  # replaces 0, whose negative powers are infinite


class QFFL(Aggregator):
    """q-FFL: weighted mean of the uploads with the step size that q-FedAvg estimates.

    Source: Li et al., ICLR 2020, Algorithm 2. It is fair, not robust: the breakdown point is 0.

    Args:
        q: At least 0. 0 is the uniform mean; a larger q gives larger weights to the clients with
            the largest losses.
        lipschitz: L > 0: 1/η, where η is a good local learning rate at q = 0.

    Shape:
        - ``uploads``: [n, d], n at least 1; ``context.start_losses``: [n], at least 0.
        - ``weights``: [n]; unused.
        - output: [d].

    Raises:
        ValueError: If an argument is out of range, there is no upload, or a client lacks a finite
            loss of at least 0.

    Example:
        >>> import torch
        >>> uploads = torch.tensor([[1.0], [3.0]])
        >>> context = RoundContext(start_losses=torch.tensor([1.0, 3.0]))
        >>> QFFL(q=1.0)(uploads, torch.ones(2), context)  # (1 · 1 + 3 · 3) / (1 + 1 + 9 + 3)
        tensor([0.7143])
    """

    shards = True
    needs_start_losses = True

    def __init__(self, q: float = 1.0, lipschitz: float = 1.0) -> None:
        super().__init__()
        check_nonnegative(q=q)
        check_positive(lipschitz=lipschitz)
        self.q = q
        self.lipschitz = lipschitz

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into q-FedAvg's step [d]."""
        self.require_uploads(uploads)
        if self.q == 0:
            return uploads.mean(dim=0, dtype=merging_dtype(uploads))
        losses = self.require_nonnegative_losses(uploads, context)
        losses = losses.clamp(min=_SMALLEST_LOSS)
        shares = tilted_weights(losses.log(), self.q)
        norms = context.sum(squared_norms(uploads))
        divisor = (shares * (1 + self.q * self.lipschitz * norms / losses)).sum()
        return weighted_sum(uploads, shares / divisor)

    def mass(self, weights: Tensor) -> float | None:
        """Return the number of clients at q = 0."""
        return len(weights) if self.q == 0 else None

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: one upload can turn the result anywhere, and a long upload shrinks it to 0."""
        return 0
