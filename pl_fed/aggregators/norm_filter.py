"""Norm filter: remove the uploads with a norm above a bound.

Z. Sun, P. Kairouz, A. T. Suresh and H. B. McMahan, "Can You Really Backdoor Federated Learning?",
arXiv 1911.07963, assume a bound on the norms that no benign upload exceeds::

    Δ_k is left out if ‖Δ_k‖ > C

C is an argument, or a multiple of the median of the round's norms, forged uploads included.

Departs from that paper: it clips the uploads, as does :class:`~pl_fed.aggregators.Clipping`.
"""

import math
from dataclasses import replace

from torch import Tensor

from pl_fed.aggregators.base import PreAggregator, PreparedUploads
from pl_fed.arguments import check_positive
from pl_fed.functional.aggregation import merging_dtype, squared_norms
from pl_fed.types import RoundContext


class NormFilter(PreAggregator):
    """Norm filter: removes the uploads with a norm above a bound, and uploads with NaN.

    Source: the norm bound of Sun et al., arXiv 1911.07963. It logs the number of removed uploads as
    ``"dropped"``, and lowers the expected number of Byzantine uploads by it. It promises no
    breakdown point.

    Args:
        threshold: The bound C > 0. ``None`` uses ``multiple``.
        multiple: The bound C in medians of the round's norms, at least 1.

    Shape:
        - ``uploads``: [n, d], n at least 1.
        - output: [m, d], m at least 1, with the weights and the context of the remaining clients.

    Raises:
        ValueError: If an argument is out of range, there is no upload, or no upload remains.

    Example:
        >>> import torch
        >>> uploads, clients = torch.tensor([[1.0], [2.0], [-9.0]]), torch.tensor([5, 0, 7])
        >>> context = RoundContext(clients=clients, losses=torch.zeros(3))
        >>> prepared = NormFilter(multiple=2.0)(uploads, torch.ones(3), context)
        >>> prepared.uploads.flatten(), prepared.context.clients
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

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> PreparedUploads:
        """Remove the uploads [n, d] with a norm above the bound."""
        self.require_uploads(uploads)
        norms = context.sum(squared_norms(uploads)).sqrt().nan_to_num(math.inf, math.inf)
        max_norm = self.threshold
        if max_norm is None:
            max_norm = self.multiple * float(norms.quantile(0.5))
        passes = (norms <= max_norm) & norms.isfinite()
        num_dropped = len(uploads) - int(passes.sum())
        context.reject_rows(~passes)
        if num_dropped == len(uploads):
            raise ValueError(
                f"Expected argument `uploads` to have a norm of at most {max_norm:g}, because"
                " NormFilter removes longer ones, but got"
                f" {float(norms.amin()):g} for the shortest of {num_dropped}: set `threshold` or"
                " `multiple` to a larger number."
            )
        dtype = merging_dtype(uploads)
        if not num_dropped:
            return PreparedUploads(uploads.to(dtype), weights, context)
        expected = max(0, context.num_byzantine - num_dropped)
        context = replace(context.select(passes), num_byzantine=expected)
        weights = weights[passes.to(weights.device)]
        return PreparedUploads(uploads[passes].to(dtype), weights, context)
