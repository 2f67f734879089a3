"""Geometric median: robust federated aggregation (RFA).

K. Pillutla, S. M. Kakade and Z. Harchaoui, "Robust Aggregation for Federated Learning", IEEE
Transactions on Signal Processing 2022, arXiv 1912.13445::

    Δ = argmin_z Σ_k α_k ‖z − Δ_k‖

by the smoothed Weiszfeld algorithm, from z = Σ_k α_k Δ_k on::

    β_k = α_k / max(ν, ‖z − Δ_k‖),   z ← Σ_k β_k Δ_k / Σ_k β_k

Departs from the paper:

- α_k is 1/n by default (``uniform``), because a Byzantine client can report any number of samples.
- The steps continue until z converges. The paper takes few steps, because each one exchanges
  messages with all clients. Here steps need the products of the uploads only.

byzfl's variant starts at 0: ``start="zero"``, with ``num_steps=3, smoothing=0.1`` for its defaults.
"""

from typing import Literal

import torch
from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_choice, check_integers, check_positive
from pl_fed.functional.aggregation import gram_matrix, weighted_sum
from pl_fed.functional.weiszfeld import weiszfeld
from pl_fed.types import RoundContext


class GeometricMedian(Aggregator):
    """Geometric median: the point with the smallest total distance to all uploads.

    Source: RFA (Pillutla et al., IEEE Transactions on Signal Processing 2022). Breakdown point: f <
    n / 2 with ``weighting="uniform"`` and ``num_steps=None``, otherwise 0. If all uploads lie on a
    line and n is even, many points have the smallest total distance. The result is then the point
    that the steps reach from the start.

    Args:
        smoothing: ν > 0, in the unit of the uploads' norm: smaller distances count as ν.
        num_steps: Number of steps, at least 1. ``None`` continues until convergence.
        start: The starting point: ``"mean"`` or ``"zero"``.
        weighting: ``"uniform"`` weights all clients equally, ``"samples"`` by their numbers of
            training samples.

    Shape:
        - ``uploads``: [n, d], n at least 1.
        - ``weights``: [n]; used with ``"samples"`` only.
        - output: [d].

    Raises:
        ValueError: If an argument is out of range, there is no upload, or an upload is not finite.

    Example:
        >>> uploads = torch.tensor([[0.0, 0.0], [1.0, 1.0], [5.0, 5.0]])
        >>> GeometricMedian()(uploads, torch.ones(3), RoundContext())
        tensor([1., 1.])
    """

    shards = True

    def __init__(
        self,
        smoothing: float = 1e-6,
        num_steps: int | None = None,
        start: Literal["mean", "zero"] = "mean",
        weighting: Literal["uniform", "samples"] = "uniform",
    ) -> None:
        super().__init__()
        check_positive(smoothing=smoothing)
        if num_steps is not None:
            check_integers(1, num_steps=num_steps)
        check_choice(("mean", "zero"), start=start)
        check_choice(("uniform", "samples"), weighting=weighting)
        self.smoothing = smoothing
        self.num_steps = num_steps
        self.start = start
        self.weighting = weighting

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into their geometric median [d]."""
        self.require_uploads(uploads)
        products = context.sum(gram_matrix(uploads))
        if not products.isfinite().all():
            raise self.overflow_error(uploads)
        counts = weights.double()
        if self.weighting == "uniform":
            counts = torch.ones_like(counts)
        shares = counts / counts.sum()
        median_shares = weiszfeld(
            products,
            shares,
            smoothing=self.smoothing,
            num_steps=self.num_steps,
            start_at_zero=self.start == "zero",
        )
        return weighted_sum(uploads, median_shares)

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: the result is bounded, but may leave the range of the benign uploads."""
        return 0

    def breakdown(self, num_uploads: int) -> int:
        """Return the largest minority; 0 for weights by samples or a limited number of steps."""
        if self.weighting == "samples" or self.num_steps is not None:
            return 0
        return max(0, (num_uploads - 1) // 2)
