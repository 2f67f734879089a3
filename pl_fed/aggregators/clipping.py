"""Norm clipping: shorten the uploads with a norm above a threshold.

T. Li, S. Hu, A. Beirami and V. Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, arXiv 2012.04221, section 4 ("clipping"); Z. Sun, P. Kairouz, A. T.
Suresh and H. B. McMahan, "Can You Really Backdoor Federated Learning?", arXiv 1911.07963::

    Δ_k ← Δ_k · min(1, C / ‖Δ_k‖)

C is an argument, or the median of the norms of the round's uploads, forged ones included. For an
even n the median is the mean of the two middle norms, as in Ditto's code.
"""

from collections.abc import Callable

from torch import Tensor

from pl_fed.aggregators.base import PreAggregator, PreparedUploads
from pl_fed.arguments import check_positive
from pl_fed.functional.aggregation import clip_norms, squared_norms
from pl_fed.types import RoundContext


class Clipping(PreAggregator):
    """Norm clipping: shortens the uploads with a norm above a threshold.

    Source: Ditto (Li et al., ICML 2021, section 4) and Sun et al., arXiv 1911.07963. It logs the
    number of shortened uploads as ``"clipped"``.

    Args:
        threshold: C > 0. ``None`` uses the median of the round's norms.

    Shape:
        - ``uploads``: [n, d], n at least 1.
        - output: [n, d].

    Raises:
        ValueError: If ``threshold`` is not positive, or there is no upload.

    Example:
        >>> import torch
        >>> uploads = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> Clipping(threshold=1.0)(uploads, torch.ones(2), RoundContext()).uploads
        tensor([[0.6000, 0.8000],
                [0.0000, 1.0000]])
    """

    shards = True

    def __init__(self, threshold: float | None = None) -> None:
        super().__init__()
        if threshold is not None:
            check_positive(threshold=threshold)
        self.threshold = threshold

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> PreparedUploads:
        """Clip the uploads [n, d] with a norm above the threshold."""
        self.require_uploads(uploads)
        norms = context.sum(squared_norms(uploads)).sqrt()
        max_norm = norms.quantile(0.5) if self.threshold is None else self.threshold
        rows, is_clipped = clip_norms(uploads, norms, max_norm)
        context.note("clipped", is_clipped.sum())
        return PreparedUploads(rows, weights, context)

    def breakdown(self, num_uploads: int, next_breakdown: Callable[[int], int]) -> int:
        """Return the next stage's breakdown: clipping lengthens no upload, and mixes none."""
        return next_breakdown(num_uploads)
