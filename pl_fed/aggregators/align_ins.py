"""AlignIns: inspect the alignment of uploads with the global model and with the majority's signs.

J. Xu, Z. Zhang and R. Hu, "Detecting Backdoor Attacks in Federated Learning via Direction Alignment
Inspection", CVPR 2025, arXiv 2503.07978. For each upload::

    TDA_k  = cos(Δ_k, w^t)
    MPSA_k = the share of the largest numbers of Δ_k with the sign of Σ_j sign(Δ_j)
    Δ = Σ_k n_k Δ_k min(1, M / ‖Δ_k‖) / Σ_k n_k    over the k with z(TDA_k) < λ_c, z(MPSA_k) < λ_s

TDA is the temporal direction alignment, MPSA the alignment of the principal signs. z is the
distance to the median of the n values, in their standard deviations. M is the median of the norms
of the accepted uploads. If no upload is accepted, the result is 0.

As in the authors' code:

- The largest numbers are the share ``top`` of all numbers.
- M is the lower one of the two middle norms for an even number of uploads.
- A number equal to 0 agrees only with a tied vote.

Departs from the authors' code:

- If all values of a criterion are equal, its z is 0/0 there, and no upload is accepted. Then z is 0
  here.
- Its mean weighs clients by samples, which is ``weighting: samples`` here.
- Numbers as large as the last one of the largest all count, so that no order decides.
"""

from typing import Literal

import torch
from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_choice, check_positive
from pl_fed.functional.aggregation import (
    clip_factors,
    inner_products,
    merge_columns,
    merging_dtype,
    squared_norms,
    weighted_sum,
)
from pl_fed.functional.outliers import lower_median, median_scores, nth_magnitude
from pl_fed.types import RoundContext


class AlignIns(Aggregator):
    """AlignIns: mean of the clipped uploads that align with the global model and with each other.

    Source: Xu et al., CVPR 2025. Breakdown point: 0, because forged uploads may be a majority of
    the accepted ones. It logs the others as ``"dropped"``, and the shortened uploads as
    ``"clipped"``. Two different uploads have the same z of 1, so radii of 1 accept neither.

    Args:
        top: The share of each upload's numbers in the comparison of signs, in (0, 1]. Numbers of
            parameters that clients keep to themselves do not count.
        cosine_radius: λ_c > 0, in standard deviations.
        sign_radius: λ_s > 0, in standard deviations.
        weighting: Weights of the mean: ``"uniform"``, or ``"samples"`` for the clients' numbers of
            training samples.

    Shape:
        - ``uploads``: [n, d], n at least 1; ``context.broadcast``: [d].
        - ``weights``: [n]; used with ``"samples"`` only.
        - output: [d]; 0 if no upload is accepted.

    Raises:
        ValueError: If an argument is out of range, there is no upload, or the broadcast has another
            length.

    Example:
        >>> uploads = torch.tensor([[1.0, 0.2], [0.9, 0.3], [1.1, 0.1], [-3.0, 4.0]])
        >>> context = RoundContext(clients=torch.arange(4), broadcast=torch.tensor([0.5, 0.5]))
        >>> AlignIns(top=1.0)(uploads, torch.ones(4), context)
        tensor([0.9719, 0.1974])
    """

    def __init__(
        self,
        top: float = 0.3,
        cosine_radius: float = 1.0,
        sign_radius: float = 1.0,
        weighting: Literal["uniform", "samples"] = "uniform",
    ) -> None:
        super().__init__()
        check_positive(top=top, cosine_radius=cosine_radius, sign_radius=sign_radius)
        if top > 1:
            raise ValueError(f"Expected argument `top` to be at most 1 but got {top}.")
        check_choice(("uniform", "samples"), weighting=weighting)
        self.top = top
        self.cosine_radius = cosine_radius
        self.sign_radius = sign_radius
        self.weighting = weighting

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into the clipped mean of the accepted ones [d]."""
        self.require_uploads(uploads)
        broadcast = self.require_broadcast(uploads, context)
        norms = squared_norms(uploads).sqrt()
        if not norms.isfinite().all():
            raise self.overflow_error(uploads)
        sent = context.select_sent(uploads)
        cosines = inner_products(uploads, broadcast) / (norms * broadcast.double().norm())
        scores = torch.stack([cosines.nan_to_num(0.0), self._sign_alignments(sent)], 1)
        by_client = context.clients.argsort(stable=True).to(uploads.device)
        deviations = torch.empty_like(scores)
        deviations[by_client] = median_scores(scores[by_client])
        radii = deviations.new_tensor([self.cosine_radius, self.sign_radius])
        accepted = (deviations < radii).all(1)
        context.reject_rows(~accepted)
        if not accepted.any():
            return torch.zeros_like(uploads[0], dtype=merging_dtype(uploads))
        norms = norms[accepted]
        factors, is_clipped = clip_factors(norms, lower_median(norms))
        context.note("clipped", is_clipped.sum())
        shares = torch.ones_like(factors)
        if self.weighting == "samples":
            shares = weights.to(factors)[accepted]
        return weighted_sum(uploads[accepted], factors * shares / shares.sum())

    def _sign_alignments(self, uploads: Tensor) -> Tensor:
        """Return the share of the largest numbers of each upload with the majority's sign, [n]."""
        majority = merge_columns(
            uploads, lambda chunk: chunk.to(merging_dtype(chunk)).sign().sum(0).sign()
        )
        num_largest = max(1, int(uploads.shape[1] * self.top))
        alignments = uploads.new_ones(len(uploads), dtype=torch.float64)
        if not uploads.shape[1]:
            return alignments
        for row, upload in enumerate(uploads):
            is_large = upload.abs() >= nth_magnitude(upload, num_largest)
            agrees = is_large & (upload.sign() == majority)
            alignments[row] = agrees.count_nonzero().double() / is_large.count_nonzero()
        return alignments

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: a forged upload that aligns with the others may have any values."""
        return 0
