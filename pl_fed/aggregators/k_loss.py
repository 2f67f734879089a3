"""k-loss: the single upload of the client with the (f + 1)-th largest loss.

A baseline of T. Li, S. Hu, A. Beirami and V. Smith, "Ditto: Fair and Robust Federated Learning
Through Personalization", ICML 2021, arXiv 2012.04221::

    Δ = the upload of the client with the (f + 1)-th largest F_k(w^t)

As in Ditto's code, F_k is the loss over all training data, at the broadcast w^t. Among equal
losses, the smallest client id counts as the smallest loss.
"""

from torch import Tensor

from pl_fed.aggregators.byzantine_count import ByzantineAwareAggregator
from pl_fed.functional.aggregation import subset_mean
from pl_fed.functional.selection import ascending_order, complement_mask
from pl_fed.types import RoundContext


class KLoss(ByzantineAwareAggregator):
    """k-loss: selects the single upload with the (f + 1)-th largest loss.

    Source: a baseline of Ditto (Li et al., ICML 2021). Breakdown point: 0. It logs the n − 1 other
    uploads as ``"dropped"``.

    Args:
        num_byzantine: The number of larger losses, f, at least 0. ``None`` uses the number of
            Byzantine uploads that the server expects.

    Shape:
        - ``uploads``: [n, d], n at least f + 1.
        - ``weights``: [n]; unused.
        - output: [d].

    Raises:
        ValueError: If ``num_byzantine`` is negative, there are too few uploads, or
            ``context.start_losses`` lacks a finite loss.

    Example:
        >>> import torch
        >>> uploads = torch.tensor([[1.0], [2.0], [3.0]])
        >>> losses = torch.tensor([0.5, 0.25, 4.0])
        >>> context = RoundContext(clients=torch.arange(3), start_losses=losses)
        >>> KLoss(num_byzantine=1)(uploads, torch.ones(3), context)
        tensor([1.])
    """

    shards = True
    needs_start_losses = True

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Select one of the uploads [n, d] as the result [d]."""
        num_larger = self.resolve_num_byzantine(context)
        self.require_uploads(uploads, num_larger + 1)
        losses = self.require_start_losses(uploads, context)
        n = len(uploads)
        order = ascending_order(losses, context.clients)
        selected = order[n - num_larger - 1 : n - num_larger]
        context.reject_rows(complement_mask(selected, n))
        return subset_mean(uploads, selected.to(uploads.device))

    def breakdown(self, num_uploads: int) -> int:
        """Return 0: a Byzantine client may have any loss."""
        return 0
