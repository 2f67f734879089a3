"""Adaptive robust clipping (ARC): clip the longest uploads to the norm of the next longest one.

Y. Allouah, R. Guerraoui, N. Gupta, A. Jellouli, G. Rizk and J. Stephan, "Adaptive Gradient Clipping
for Robust Federated Learning", ICLR 2025, arXiv 2405.14432::

    k = ⌊2 (f / n) (n − f)⌋,   C = the (k + 1)-th largest of ‖Δ_1‖, ..., ‖Δ_n‖
    Δ_i ← Δ_i · min(1, C / ‖Δ_i‖)

For f ≤ n / 2, k is at least f. Then no clipped upload is longer than the longest benign upload.
"""

from collections.abc import Callable

from torch import Tensor

from pl_fed.aggregators.base import PreAggregator, PreparedUploads
from pl_fed.aggregators.byzantine_count import ByzantineCount
from pl_fed.functional.aggregation import clip_norms, squared_norms
from pl_fed.types import RoundContext


class AdaptiveClipping(ByzantineCount, PreAggregator):
    """Adaptive robust clipping (ARC): clips the k longest uploads to the norm of the next one.

    Source: Allouah et al., ICLR 2025. It logs the number of clipped uploads as ``"clipped"``.

    Args:
        num_byzantine: The assumed number of Byzantine uploads, the paper's f, at least 0. ``None``
            uses the number that the server expects. With 0 nothing is clipped.

    Shape:
        - ``uploads``: [n, d], n > f.
        - output: [n, d].

    Raises:
        ValueError: If ``num_byzantine`` is negative, or there are f or fewer uploads.

    Example:
        >>> import torch
        >>> uploads = torch.tensor([[1.0], [2.0], [-3.0], [4.0]])
        >>> AdaptiveClipping(num_byzantine=1)(uploads, torch.ones(4), RoundContext()).uploads.T
        tensor([[ 1.,  2., -3.,  3.]])
    """

    shards = True

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> PreparedUploads:
        """Clip the longest ones of the uploads [n, d]."""
        byzantine = self.resolve_num_byzantine(context)
        self.require_uploads(uploads, byzantine + 1)
        n = len(uploads)
        norms = context.sum(squared_norms(uploads)).sqrt()
        num_clipped = 2 * byzantine * (n - byzantine) // n
        max_norm = norms.sort(descending=True).values[num_clipped]
        rows, is_clipped = clip_norms(uploads, norms, max_norm)
        context.note("clipped", is_clipped.sum())
        return PreparedUploads(rows, weights, context)

    def breakdown(self, num_uploads: int, next_breakdown: Callable[[int], int]) -> int:
        """Return the next stage's breakdown: clipping lengthens no upload, and mixes none."""
        return next_breakdown(num_uploads)
