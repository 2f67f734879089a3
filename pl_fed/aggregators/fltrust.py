"""FLTrust: weight the uploads by their similarity to the server's own update.

X. Cao, M. Fang, J. Liu and N. Z. Gong, "FLTrust: Byzantine-Robust Federated Learning via Trust
Bootstrapping", NDSS 2021, arXiv 2012.13995, equations 2 to 4. The root Δ_0 is the update of the
global model after training on a small data set of the server::

    trust_k = max(0, ⟨Δ_k, Δ_0⟩ / (‖Δ_k‖ ‖Δ_0‖))
    Δ = Σ_k trust_k (‖Δ_0‖ / ‖Δ_k‖) Δ_k / Σ_k trust_k

If no upload is trusted, the result is 0, and the round does not change the global model. The paper
leaves this case open. BackFed does the same, and FLPoison takes the plain mean. FLPoison's server
has 100 samples, with the class shares of the training set. BackFed's server step is 0.1 times the
update; until October 2025, its root was never set, so that its FLTrust was FedAvg.

With an algorithm whose clients keep a part of the model, such as FedPer, Δ_0 is the update of the
shared part, because uploads are.
"""

import torch
from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.functional.aggregation import (
    inner_products,
    merging_dtype,
    squared_norms,
    weighted_sum,
)
from pl_fed.types import RoundContext


class FLTrust(Aggregator):
    """FLTrust: mean of the uploads, rescaled to the length of the server's update, by trust.

    Source: Cao et al., NDSS 2021, equations 2 to 4. The trust of an upload is its cosine to the
    root, the update from the server's own data, or 0 if this cosine is negative. Set
    ``data.root_samples``, for example ``100``, to give the server data. Breakdown point: 0 by the
    definition of ``breakdown``, but the result is never longer than the root. It logs the
    number of uploads with trust 0 as ``"dropped"``.

    Shape:
        - ``uploads``: [n, d], n at least 1; ``context.root``: [d].
        - ``weights``: [n]; unused.
        - output: [d], no longer than the root; 0 if no upload is trusted.

    Raises:
        ValueError: If there is no upload, or no finite root of the uploads' length.

    Example:
        >>> uploads = torch.tensor([[2.0, 0.0], [0.0, 0.5], [-9.0, -9.0]])
        >>> context = RoundContext(root=torch.tensor([3.0, 4.0]))
        >>> FLTrust()(uploads, torch.ones(3), context)  # trust 3/5, 4/5 and 0
        tensor([2.1429, 2.8571])
    """

    shards = True
    needs_root = True

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into their mean by trust [d]."""
        self.require_uploads(uploads)
        if context.root.shape != uploads.shape[1:]:
            raise self._root_error(f"shape {list(context.root.shape)}")
        root = context.root
        length = context.sum(squared_norms(root[None]))[0].sqrt()
        if not length.isfinite():
            raise self._root_error("NaN or infinity")
        norms = context.sum(squared_norms(uploads)).sqrt()
        trust = context.sum(inner_products(uploads, root)) / (norms * length)
        trusted = (trust > 0) & trust.isfinite() & norms.isfinite()  # False for NaN
        context.reject_rows(~trusted)
        trust, norms = trust[trusted].clamp(max=1), norms[trusted]
        largest = torch.finfo(merging_dtype(uploads)).max  # for uploads with a norm near 0
        factors = (trust / trust.sum() * length / norms).clamp(max=largest)
        return weighted_sum(uploads[trusted], factors)

    def _root_error(self, got: str) -> ValueError:
        return ValueError(
            "Expected `context.root` to be the update from the server's own data for FLTrust, with"
            f" as many finite numbers as an upload, but got {got}."
        )

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: a forged upload at an acute angle to the root may have any direction within it.

        There is no promise relative to the benign uploads. But the result is no longer than the
        root, for any uploads.
        """
        return 0
