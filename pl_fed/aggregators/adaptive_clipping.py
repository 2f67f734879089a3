"""Adaptive robust clipping (ARC): the longest uploads are made as long as the next one.

Y. Allouah, R. Guerraoui, N. Gupta, A. Jellouli, G. Rizk and J. Stephan, "Adaptive Gradient Clipping
for Robust Federated Learning", ICLR 2025, arXiv 2405.14432::

    k = ⌊2 (f / n) (n − f)⌋,   C = the (k + 1)-th largest of ‖Δ_1‖, ..., ‖Δ_n‖
    Δ_i ← Δ_i · min(1, C / ‖Δ_i‖)

As k is at least f for f ≤ n / 2, no upload is longer than the longest honest one.
"""

from collections.abc import Callable

from torch import Tensor

from pl_fed.aggregators.base import PreAggregator, Prepared
from pl_fed.aggregators.counting import Expecting
from pl_fed.functional.aggregation import shortened, squared_norms
from pl_fed.types import RoundContext


class AdaptiveClipping(Expecting, PreAggregator):
    """Shorten as many of the longest uploads as may be byzantine; ``"clipped"`` counts them.

    Args:
        num_byzantine: How many byzantine uploads to count with, the paper's f, at least 0. ``None``
            takes the number that the server expects. With 0 nothing is clipped.

    Shape:
        - ``uploads``: [n, d], n above f.
        - output: [n, d].

    Raises:
        ValueError: If ``num_byzantine`` is negative, or there are not more uploads than that.

    Example:
        >>> import torch
        >>> uploads = torch.tensor([[1.0], [2.0], [-3.0], [4.0]])
        >>> AdaptiveClipping(num_byzantine=1)(uploads, torch.ones(4), RoundContext()).uploads.T
        tensor([[ 1.,  2., -3.,  3.]])
    """

    shards = True

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Prepared:
        """Shorten the longest of uploads [n, d]."""
        byzantine = self.expected(context)
        self.require_uploads(uploads, byzantine + 1)
        n = len(uploads)
        norms = context.sum(squared_norms(uploads)).sqrt()
        most = 2 * byzantine * (n - byzantine) // n
        clipped, which = shortened(uploads, norms, norms.sort(descending=True).values[most])
        context.note("clipped", which.sum())
        return Prepared(clipped, weights, context)

    def breakdown(self, num_uploads: int, then: Callable[[int], int]) -> int:
        """Return what comes next: no upload becomes longer, and each stays its client's."""
        return then(num_uploads)
