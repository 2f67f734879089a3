"""AdaFed: a common descent direction that lowers each client's loss in proportion to its power.

S. M. Hamidi and E.-H. Yang, "AdaFed: Fair Federated Learning via Adaptive Common Descent
Direction", TMLR 2024, arXiv 2401.04993, Algorithm 1. With g_k = Δ_k / ‖Δ_k‖ and F_k = F_k(w^t)::

    o_k = (g_k − Σ_{j<k} c_kj o_j) / (F_k^γ − Σ_{j<k} c_kj),   c_kj = g_k · o_j / ‖o_j‖²
    Δ = Σ_k o_k / ‖o_k‖² / Σ_k 1 / ‖o_k‖²

The o_k are orthogonal, so Δ · o_k = ‖Δ‖² for all k, and therefore Δ · g_k = ‖Δ‖² F_k^γ. Only one
point of the span of independent g_k does that. With the Gram matrix P of the g_k and
f = (F_1^γ, …, F_n^γ)::

    a = P⁻¹ f,    Δ = Σ_k a_k g_k / (f · a)

So the order of the clients does not matter, and no denominator can be 0 on the way.

Departs from the paper: P + ε I, with ε = 1e-12, takes the place of P. The result is that of g_k
with a tiny own coordinate each. Where the g_k are dependent, as with more clients than parameters,
o_k is 0 / 0; here Δ then goes to 0, unless the losses agree with the dependence. Updates of
length 0 have no direction, and are left out.

The length of Δ is up to min_k F_k^−γ: it grows while the losses fall. The learning rate of the
server's optimizer is the paper's step size.
"""

import torch
from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_nonnegative
from pl_fed.functional.aggregation import gram_matrix, linear_combinations, merging_dtype
from pl_fed.types import RoundContext

_LIFT = 1e-12  # ε: the squared length of a direction's own coordinate


class AdaFed(Aggregator):
    """AdaFed: the direction that lowers all losses, those of larger clients' losses more.

    Source: Hamidi and Yang, TMLR 2024, Algorithm 1. Breakdown point: 0, because one upload turns
    the direction, and a small loss lengthens the step.

    Args:
        gamma: γ ≥ 0. At 0 all losses decrease at the same rate; the larger γ, the more those of
            clients with large losses. 1 to 3 are common.

    Shape:
        - ``uploads``: [n, d], n at least 1; ``context.start_losses``: [n], at least 0.
        - ``weights``: [n]; unused.
        - output: [d]; 0 if all uploads are 0, or all losses.

    Raises:
        ValueError: If ``gamma`` is negative or infinite, there is no upload, a client lacks a
            finite loss of at least 0, or the context lacks the clients' ids.

    Example:
        >>> uploads = torch.tensor([[3.0, 0.0], [0.0, 0.5]])
        >>> context = RoundContext(
        ...     clients=torch.arange(2), start_losses=torch.tensor([1.0, 2.0])
        ... )
        >>> AdaFed(gamma=1.0)(uploads, torch.ones(2), context)
        tensor([0.2000, 0.4000])
    """

    shards = True
    needs_start_losses = True

    def __init__(self, gamma: float = 1.0) -> None:
        super().__init__()
        check_nonnegative(gamma=gamma)
        self.gamma = gamma

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into the common descent direction [d]."""
        self.require_uploads(uploads)
        clients = self.require_clients(uploads, context)
        losses = self.require_nonnegative_losses(uploads, context).double()
        by_client = clients.argsort(stable=True).to(uploads.device)
        products = context.sum(gram_matrix(uploads, by_client))
        if not products.isfinite().all():
            raise self.overflow_error(uploads)
        norms = products.diagonal().sqrt()
        scale = torch.where(norms > 0, 1 / norms, 0)
        losses = losses.to(uploads.device)[by_client] * (norms > 0)
        largest = losses.max()
        if not largest > 0:
            return uploads.new_zeros(uploads.shape[1], dtype=merging_dtype(uploads))
        targets = torch.where(norms > 0, (losses / largest) ** self.gamma, 0)
        lifted = scale[:, None] * products * scale + _LIFT * torch.eye(len(norms)).to(products)
        solution = torch.linalg.solve(lifted, targets)
        shares = torch.empty_like(solution)
        shares[by_client] = solution * scale / (targets @ solution * largest**self.gamma)
        return linear_combinations(uploads, shares[None])[0]

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: one upload can turn the result anywhere."""
        return 0
