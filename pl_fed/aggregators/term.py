"""TERM: weight the clients by their tilted losses.

T. Li, A. Beirami, M. Sanjabi and V. Smith, "Tilted Empirical Risk Minimization", ICLR 2021, arXiv
2007.01162, as in Ditto's "fair" baseline (arXiv 2012.04221, section 4)::

    Δ = Σ_k p_k Δ_k,   p_k = e^{t F_k(w^t)} / Σ_j e^{t F_j(w^t)}  over the cohort

F_k is the loss over all training data of client k, poisoned labels included. Δ is the gradient of
(1/t) log mean_k e^{t F_k}, with the local work of a round in place of each client's gradient.

At t = ∞ all weight is on the client with the largest loss. This is the objective max_k F_k of M.
Mohri, G. Sivek and A. T. Suresh, "Agnostic Federated Learning" (AFL), ICML 2019, arXiv 1902.00146,
over the cohort. It is not AFL's solver: that moves the weights by projected ascent from round to
round.

Departs from TERM's own federated code: there the normaliser is a moving average over rounds, and
the step is shorter by a factor of n.
"""

import math

from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.functional.aggregation import merging_dtype, weighted_mean
from pl_fed.functional.tilted import tilted_weights
from pl_fed.types import RoundContext


class Term(Aggregator):
    """Tilted empirical risk minimization (TERM): mean weighted by the clients' tilted losses.

    Source: Li et al., ICLR 2021. It is fair, not robust: with t > 0, a client with poisoned labels
    has the largest weight. Breakdown point: 0.

    Args:
        t: The tilt, any number. 0 is the uniform mean; ∞ selects the client with the largest loss,
            −∞ the one with the smallest.

    Shape:
        - ``uploads``: [n, d], n at least 1; ``context.start_losses``: [n].
        - ``weights``: [n]; unused.
        - output: [d].

    Raises:
        ValueError: If ``t`` is NaN, there is no upload, or a client lacks a finite loss.

    Example:
        >>> import torch
        >>> uploads = torch.tensor([[1.0], [5.0]])
        >>> context = RoundContext(start_losses=torch.tensor([0.0, 3.0]).log1p())
        >>> Term(t=1.0)(uploads, torch.ones(2), context)  # weights 1/5 and 4/5
        tensor([4.2000])
    """

    shards = True
    needs_start_losses = True

    def __init__(self, t: float = 1.0) -> None:
        super().__init__()
        if math.isnan(t):
            raise ValueError(f"Expected argument `t` to be a number but got {t}.")
        self.t = t
        self.weighs_clients = t != 0

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into their weighted mean [d]."""
        self.require_uploads(uploads)
        if self.t == 0:
            return uploads.mean(dim=0, dtype=merging_dtype(uploads))
        losses = self.require_start_losses(uploads, context)
        shares = tilted_weights(losses, self.t)
        context.weigh_rows(shares)
        return weighted_mean(uploads, shares)

    def mass(self, weights: Tensor) -> float | None:
        """Return the number of clients at t = 0."""
        return len(weights) if self.t == 0 else None

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: one upload can move the result anywhere."""
        return 0
