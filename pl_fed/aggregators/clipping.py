"""Clipping: no upload is longer than the others.

Ditto (T. Li, S. Hu, A. Beirami and V. Smith, ICML 2021, arXiv 2012.04221, section 4, "clipping"),
and Z. Sun et al., "Can you really backdoor federated learning?", arXiv 1911.07963::

    Δ_k ← Δ_k · min(1, C / ‖Δ_k‖)

where C is given, or the median of the norms of the round's uploads, hostile ones included: so
Ditto's code, which takes the mean of the two middle norms for an even n.
"""

from collections.abc import Callable

from torch import Tensor

from pl_fed.aggregators.base import PreAggregator, Prepared
from pl_fed.arguments import check_positive
from pl_fed.functional.aggregation import shortened, squared_norms
from pl_fed.types import RoundContext


class Clipping(PreAggregator):
    """Shorten the uploads whose norm is above a threshold; ``"clipped"`` counts them.

    Args:
        threshold: C > 0, or ``None`` for the median of the round's norms.

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

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Prepared:
        """Shorten what is too long of uploads [n, d]."""
        self.require_uploads(uploads)
        norms = context.sum(squared_norms(uploads)).sqrt()
        longest = norms.quantile(0.5) if self.threshold is None else self.threshold
        clipped, which = shortened(uploads, norms, longest)
        context.note("clipped", which.sum())
        return Prepared(clipped, weights, context)

    def breakdown(self, num_uploads: int, then: Callable[[int], int]) -> int:
        """Return what comes next: no upload becomes longer, and each stays its client's."""
        return then(num_uploads)
