"""LASA (layer-adaptive sparsified aggregation): filter sparse uploads tensor by tensor.

J. Xu, Z. Zhang and R. Hu, "Achieving Byzantine-Resilient Federated Learning via Layer-Adaptive
Sparsified Model Aggregation", WACV 2025, arXiv 2409.01435. In each round::

    c_k = Δ_k · min(1, M / ‖Δ_k‖),  M the median of the norms
    s_k = c_k with its largest numbers only: the share 1 − sparsity of its weights, and all biases
    B_ℓ = the uploads with z(‖s_kℓ‖) < λ_n and z(q(s_kℓ)) < λ_s    for each parameter tensor ℓ
    Δ_ℓ = mean of c_kℓ over k in B_ℓ, or over all k if B_ℓ is empty

z is the distance to the median of the n values, in their standard deviations. q is the share of
positive numbers, (1 + Σ sign / Σ |sign|) / 2. Weights are the tensors of two and more dimensions.

As in the authors' code:

- M is the lower one of the two middle norms for an even n.
- A weight has to be above the last one of the largest, so that one number less remains.

Departs from the authors' code:

- Its means are those of the sparse s_k, because its sparsification overwrites the clipped uploads.
  ``mean: "sparse"`` does so. The default is the paper's mean of the clipped uploads: with the
  sparse mean, the small weights of a layer never move.
- If all z are 0/0 there, no upload is in B_ℓ, and the mean has all of them, forged ones included.
  Then z is 0 here.
- An upload without any number in s_kℓ has q = 0/0 there, which makes the median NaN. One client can
  so switch the filter off, by equal magnitudes. Its q is 1/2 here.
- It lists running statistics of norms as tensors. pl_fed averages them separately.
- It sparsifies tensors of two and four dimensions only.

FLPoison takes the unclipped uploads in all steps but the mean, and λ_n = 2 except for CIFAR.
"""

from typing import Literal

import torch
from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_choice, check_interval, check_positive
from pl_fed.functional.aggregation import clip_factors, merging_dtype, squared_norms, weighted_sum
from pl_fed.functional.outliers import lower_median, median_scores, nth_magnitude
from pl_fed.nets.rows import RowLayout
from pl_fed.types import RoundContext


class LASA(Aggregator):
    """LASA: mean of the clipped uploads, in each parameter tensor without its outliers.

    Source: Xu et al., WACV 2025. Breakdown point: f < n / 2, because no upload is longer than the
    median norm after clipping. It logs the shortened uploads as ``"clipped"``, and the uploads that
    no tensor's mean includes as ``"dropped"``.

    Args:
        sparsity: The share of the weights that do not count in the filters, in [0, 1): of those
            that clients send, if they keep some to themselves.
        norm_radius: λ_n > 0, in standard deviations.
        sign_radius: λ_s > 0, in standard deviations.
        mean: Numbers in the mean: all (``"dense"``), or only the largest ones (``"sparse"``).

    Shape:
        - ``uploads``: [n, d], n at least 1; ``context.layout``: of d numbers.
        - ``weights``: [n]; unused.
        - output: [d].

    Raises:
        ValueError: If an argument is out of range, there is no upload, or the layout is unknown.

    Example:
        >>> layout = RowLayout.from_tensors([("weight", torch.ones(1, 2)), ("bias", torch.ones(1))])
        >>> context = RoundContext(clients=torch.arange(4), layout=layout)
        >>> uploads = torch.tensor([[1.0, 2.0, 2.0], [2.0, 1.0, 2.0], [2.0, 2.0, 1.0], [-9.0] * 3])
        >>> LASA(sparsity=0.0, norm_radius=3.0)(uploads, torch.ones(4), context)
        tensor([1.6667, 1.6667, 1.6667])
    """

    def __init__(
        self,
        sparsity: float = 0.3,
        norm_radius: float = 1.0,
        sign_radius: float = 1.0,
        mean: Literal["dense", "sparse"] = "dense",
    ) -> None:
        super().__init__()
        check_interval("[0, 1)", sparsity=sparsity)
        check_positive(norm_radius=norm_radius, sign_radius=sign_radius)
        check_choice(("dense", "sparse"), mean=mean)
        self.sparsity = sparsity
        self.norm_radius = norm_radius
        self.sign_radius = sign_radius
        self.mean = mean

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into the mean of each tensor's benign ones [d]."""
        self.require_uploads(uploads)
        layout = self.require_layout(uploads, context)
        squares = squared_norms(uploads)
        if not squares.isfinite().all():
            raise self.overflow_error(uploads)
        norms = squares.sqrt()
        factors, is_clipped = clip_factors(norms, lower_median(norms))
        context.note("clipped", is_clipped.sum())
        pieces = _list_pieces(layout, context.unsent)
        thresholds = self._find_thresholds(uploads, pieces)
        accepted = self._filter(uploads, factors, thresholds, pieces, context.clients)
        context.reject_rows(~accepted.any(1))
        merged = torch.zeros_like(uploads[0], dtype=merging_dtype(uploads))
        for index, (piece, is_weight) in enumerate(pieces):
            members = accepted[:, index]
            rows = uploads[members, piece]
            if self.mean == "sparse" and is_weight:
                rows = rows.where(rows.abs() > thresholds[members, None], 0)
            merged[piece] = weighted_sum(rows, factors[members] / len(rows))
        return merged

    def _find_thresholds(self, uploads: Tensor, pieces: list[tuple[slice, bool]]) -> Tensor:
        """Return the magnitude that a weight of each upload has to exceed to count, [n]."""
        weights = [piece for piece, is_weight in pieces if is_weight]
        num_weights = sum(piece.stop - piece.start for piece in weights)
        num_largest = int(num_weights * (1 - self.sparsity))
        thresholds = uploads.new_full((len(uploads),), -1.0)
        if not self.sparsity or not num_weights:
            return thresholds
        for row, upload in enumerate(uploads):
            numbers = torch.cat([upload[piece] for piece in weights])
            thresholds[row] = nth_magnitude(numbers, max(1, num_largest))
        return thresholds

    def _filter(
        self,
        uploads: Tensor,
        factors: Tensor,
        thresholds: Tensor,
        pieces: list[tuple[slice, bool]],
        clients: Tensor,
    ) -> Tensor:
        """Return the uploads in the mean of each tensor, bool [n, tensors]."""
        norms, shares = torch.zeros(
            2, len(uploads), len(pieces), dtype=torch.float64, device=uploads.device
        )
        for row, upload in enumerate(uploads):
            for index, (piece, is_weight) in enumerate(pieces):
                numbers = upload[piece]
                if is_weight:
                    numbers = numbers.where(numbers.abs() > thresholds[row], 0)
                norm = torch.linalg.vector_norm(numbers, dtype=torch.float64)
                norms[row, index] = factors[row] * norm
                positive, count = (numbers > 0).count_nonzero(), numbers.count_nonzero()
                shares[row, index] = torch.where(count > 0, positive.double() / count, 0.5)
        by_client = clients.argsort(stable=True).to(uploads.device)
        accepted = torch.empty_like(norms, dtype=torch.bool)
        accepted[by_client] = (median_scores(norms[by_client]) < self.norm_radius) & (
            median_scores(shares[by_client]) < self.sign_radius
        )
        return accepted | ~accepted.any(0)

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: a forged upload with usual norms and signs may have any values."""
        return 0

    def breakdown(self, num_uploads: int) -> int:
        """Return the largest minority: the result is at most √n times the median of the norms."""
        return max(0, (num_uploads - 1) // 2)


def _list_pieces(layout: RowLayout, unsent: Tensor) -> list[tuple[slice, bool]]:
    """Return the slices of the tensors that clients send, and whether each is sparsified.

    Weights of linear and convolutional layers are sparsified, biases are not.
    """
    positions = set(unsent.tolist())
    ends = zip(layout.offsets[:-1], layout.offsets[1:], layout.shapes)
    return [
        (slice(begin, end), len(shape) > 1) for begin, end, shape in ends if begin not in positions
    ]
