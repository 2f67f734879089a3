"""Centered clipping.

S. P. Karimireddy, L. He and M. Jaggi, "Learning from History for Byzantine Robust Optimization",
ICML 2021, arXiv 2012.10333, section 4::

    v_0 = the last round's Δ, or 0 in the first
    v_l = v_{l−1} + 1/n Σ_k (Δ_k − v_{l−1}) · min(1, τ / ‖Δ_k − v_{l−1}‖)     l = 1, ..., L
    Δ = v_L

The paper has clients send a momentum of their gradients; here they send what the algorithm has them
send, and the server's optimizer may have a momentum.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_integers, check_positive
from pl_fed.functional.aggregation import merging_dtype, squared_norms, weighted_sum
from pl_fed.types import RoundContext


class CenteredClipping(Aggregator):
    """Move the last round's result by the mean of what the uploads differ from it, clipped.

    No round moves it by more than L τ, whatever the uploads hold. ``"clipped"`` counts those that
    are too far from the last centre, v_{L−1}.

    Args:
        tau: τ > 0, in the units of the uploads' norm: how far from the centre an upload may pull.
        num_steps: L, at least 1.

    Shape:
        - ``uploads``: [n, d], n at least 1, d the same in all rounds.
        - ``weights``: [n]; not read.
        - output: [d].

    Attributes:
        centre: The last result [d], empty before the first.

    Raises:
        ValueError: If an argument is out of range, there is no upload or one is not finite, or d
            changes.

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
        self.register_buffer("centre", torch.empty(0))

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into a row [d] that is near the last one."""
        self.require_uploads(uploads)
        n, d = uploads.shape
        if self.centre.numel() not in (0, d):
            raise ValueError(
                f"Expected argument `uploads` to be of shape [n, {self.centre.numel()}] for"
                f" CenteredClipping, as in the rounds before, but got shape {list(uploads.shape)}."
            )
        kept = self.centre if self.centre.numel() else torch.zeros(d)
        centre = kept.to(uploads.device, merging_dtype(uploads))
        for _ in range(self.num_steps):
            far = squared_norms(uploads, centre).sqrt()
            if not far.isfinite().all():
                raise self.overflow(uploads)
            shares = (self.tau / far).clamp(max=1) / n
            centre = weighted_sum(uploads, shares).addcmul_(centre, 1 - shares.sum().to(centre))
        context.note("clipped", (far > self.tau).sum())
        self.centre = centre.clone()
        return centre

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: a byzantine upload pulls as far as τ, wherever the honest ones are."""
        return 0

    def breakdown(self, num_uploads: int) -> int:
        """Return 0: τ bounds the result, which honest uploads may be much shorter than."""
        return 0

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(f"{prefix}centre")
        if saved is not None:  # its length is known from the first round on only
            self.centre = torch.empty_like(saved, device=self.centre.device)
        super()._load_from_state_dict(state_dict, prefix, *args)
