"""Centered clipping: move the last result by the mean of the clipped differences to it.

S. P. Karimireddy, L. He and M. Jaggi, "Learning from History for Byzantine Robust Optimization",
ICML 2021, arXiv 2012.10333, section 4::

    v_0 = the last round's Δ, or 0 in the first
    v_l = v_{l−1} + 1/n Σ_k (Δ_k − v_{l−1}) · min(1, τ / ‖Δ_k − v_{l−1}‖)     l = 1, ..., L
    Δ = v_L

Departs from the paper: there clients send the momentum of their gradients. Here clients send the
uploads of their algorithm, and the server optimizer may have a momentum.
"""

import torch
from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_integers, check_positive
from pl_fed.functional.aggregation import merging_dtype, squared_norms, weighted_sum
from pl_fed.types import RoundContext


class CenteredClipping(Aggregator):
    """Centered clipping: moves the last result by the mean of the clipped differences to it.

    Source: Karimireddy et al., ICML 2021, section 4. A round moves the result by at most L τ, for
    any uploads. By the definition of :meth:`breakdown`, the breakdown point is 0. It logs the
    number of uploads farther than τ from the last centre v_{L−1} as ``"clipped"``.

    Args:
        tau: τ > 0, the largest pull of an upload in a step, in the unit of the uploads' norm.
        num_steps: The number of steps L, at least 1.

    Shape:
        - ``uploads``: [n, d], n at least 1; d is constant over all rounds.
        - ``weights``: [n]; unused.
        - output: [d].

    Attributes:
        centre: The last result [d], empty before the first round.

    Raises:
        ValueError: If an argument is out of range, there is no upload, an upload is not finite, or
            d changes.

    Example:
        >>> merge = CenteredClipping(tau=2.0)
        >>> uploads = torch.tensor([[1.0, 0.0], [0.0, 6.0]])
        >>> merge(uploads, torch.ones(2), RoundContext())
        tensor([0.5000, 1.0000])
        >>> merge(uploads, torch.ones(2), RoundContext())
        tensor([0.6505, 1.4950])
    """

    centre: Tensor

    def __init__(self, tau: float = 10.0, num_steps: int = 1) -> None:
        super().__init__()
        check_positive(tau=tau)
        check_integers(1, num_steps=num_steps)
        self.tau = tau
        self.num_steps = num_steps
        self.add_memory("centre")

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into a row [d] near the last result."""
        self.require_uploads(uploads)
        n, d = uploads.shape
        if self.centre.numel() not in (0, d):
            raise ValueError(
                f"Expected argument `uploads` to be of shape [n, {self.centre.numel()}] for"
                f" CenteredClipping, as in earlier rounds, but got shape {list(uploads.shape)}."
            )
        start = self.centre if self.centre.numel() else torch.zeros(d)
        centre = start.to(uploads.device, merging_dtype(uploads))
        for _ in range(self.num_steps):
            distances = squared_norms(uploads, centre).sqrt()
            if not distances.isfinite().all():
                raise self.overflow_error(uploads)
            shares = (self.tau / distances).clamp(max=1) / n
            centre = weighted_sum(uploads, shares).addcmul_(centre, 1 - shares.sum().to(centre))
        context.note("clipped", (distances > self.tau).sum())
        self.centre = centre.clone()
        return centre

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: a Byzantine upload pulls over a distance of τ, wherever the benign ones lie."""
        return 0

    def breakdown(self, num_uploads: int) -> int:
        """Return 0: τ bounds the result, but benign uploads may be much shorter than τ."""
        return 0
