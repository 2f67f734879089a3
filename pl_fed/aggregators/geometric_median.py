"""The geometric median: robust federated aggregation, RFA.

K. Pillutla, S. M. Kakade and Z. Harchaoui, "Robust Aggregation for Federated Learning", IEEE
Transactions on Signal Processing 2022, arXiv 1912.13445::

    Δ = argmin_z Σ_k α_k ‖z − Δ_k‖

by the smoothed Weiszfeld algorithm, from z = Σ_k α_k Δ_k on::

    β_k = α_k / max(ν, ‖z − Δ_k‖),   z ← Σ_k β_k Δ_k / Σ_k β_k

Departs from the paper: α_k is 1/n by default (``uniform``), as a byzantine client may say that it
has any number of samples; and steps are made until z stands still, where the paper makes a few,
each of which is an exchange with all clients there. Here they need the products of the uploads
only. byzfl's starts at 0: ``start="zero"``, with ``num_steps=3, smoothing=0.1`` for its defaults.
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
    """The row whose distances to all uploads have the smallest sum.

    Where all uploads lie on a line and n is even there are many such rows; the one that is reached
    from the start is taken.

    Args:
        smoothing: ν > 0, in the units of the uploads' norm: within it a distance counts as ν.
        num_steps: How many steps are made, at least 1. ``None`` goes on until it stands still.
        start: Where it starts: the ``"mean"`` or ``"zero"``.
        weighting: ``"uniform"`` counts each client once, ``"samples"`` each training sample.

    Shape:
        - ``uploads``: [n, d], n at least 1.
        - ``weights``: [n]; read with ``"samples"`` only.
        - output: [d].

    Raises:
        ValueError: If an argument is out of range, there is no upload, or one is not finite.

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
            raise self.overflow(uploads)
        counts = weights.double()
        if self.weighting == "uniform":
            counts = torch.ones_like(counts)
        shares = counts / counts.sum()
        found = weiszfeld(products, shares, self.smoothing, self.num_steps, self.start == "zero")
        return weighted_sum(uploads, found)

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: it is bounded, but may leave the range of the honest uploads."""
        return 0

    def breakdown(self, num_uploads: int) -> int:
        """Return all below a half; 0 by samples, or if the number of steps is limited."""
        if self.weighting == "samples" or self.num_steps is not None:
            return 0
        return max(0, (num_uploads - 1) // 2)
