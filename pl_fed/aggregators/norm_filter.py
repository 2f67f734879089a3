"""The norm filter: uploads that are too long are left out.

The simplest of the defences that look for outliers, as in Z. Sun, P. Kairouz, A. T. Suresh and
H. B. McMahan, "Can You Really Backdoor Federated Learning?", arXiv 1911.07963, who think of a bound
on the norms that no honest upload exceeds::

    Δ_k is left out if ‖Δ_k‖ > C

where C is given, or a multiple of the median of the round's norms, hostile ones included.

Departs from that paper, which goes on to clip instead: :class:`~pl_fed.aggregators.Clipping`.
"""

import math
from dataclasses import replace

from torch import Tensor

from pl_fed.aggregators.base import PreAggregator, Prepared
from pl_fed.arguments import check_positive
from pl_fed.functional.aggregation import merging_dtype, squared_norms
from pl_fed.types import RoundContext


class NormFilter(PreAggregator):
    """Leave out the uploads whose norm is above a bound; ``"dropped"`` counts them.

    The server then expects as many byzantine uploads fewer. Uploads with NaN are left out, too.

    Args:
        threshold: C > 0; or ``None``.
        multiple: C in medians of the round's norms, at least 1, if there is no ``threshold``.

    Shape:
        - ``uploads``: [n, d], n at least 1.
        - output: [m, d], with weights and a context of the clients that are left, m at least 1.

    Raises:
        ValueError: If an argument is out of range, there is no upload, or none is left.

    Example:
        >>> import torch
        >>> uploads, clients = torch.tensor([[1.0], [2.0], [-9.0]]), torch.tensor([5, 0, 7])
        >>> context = RoundContext(clients=clients, losses=torch.zeros(3))
        >>> kept = NormFilter(multiple=2.0)(uploads, torch.ones(3), context)
        >>> kept.uploads.flatten(), kept.context.clients
        (tensor([1., 2.]), tensor([5, 0]))
    """

    shards = True

    def __init__(self, threshold: float | None = None, multiple: float = 3.0) -> None:
        super().__init__()
        if threshold is not None:
            check_positive(threshold=threshold)
        if not 1 <= multiple < math.inf:
            raise ValueError(
                f"Expected argument `multiple` to be at least 1, and finite, but got {multiple}."
            )
        self.threshold = threshold
        self.multiple = multiple

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Prepared:
        """Leave out what is too long of uploads [n, d]."""
        self.require_uploads(uploads)
        norms = context.sum(squared_norms(uploads)).sqrt().nan_to_num(math.inf, math.inf)
        longest = self.threshold
        if longest is None:
            longest = self.multiple * float(norms.quantile(0.5))
        kept = (norms <= longest) & norms.isfinite()
        dropped = len(uploads) - int(kept.sum())
        context.note("dropped", dropped)
        if dropped == len(uploads):
            raise ValueError(
                f"Expected argument `uploads` to have a norm of at most {longest:g}, for NormFilter"
                f" leaves out longer ones, but got {float(norms.amin()):g} for the shortest of"
                f" {dropped}."
            )
        dtype = merging_dtype(uploads)
        if not dropped:
            return Prepared(uploads.to(dtype), weights, context)
        expected = max(0, context.num_byzantine - dropped)
        context = replace(context.of(kept), num_byzantine=expected)
        return Prepared(uploads[kept].to(dtype), weights[kept.to(weights.device)], context)
