"""CAF: the covariance-bound-agnostic filter.

Y. Allouah, R. Guerraoui and J. Stephan, "Towards Trustworthy Federated Learning with Untrusted
Participants", ICML 2025, arXiv 2505.01874, Algorithm 2::

    c = (1, ..., 1),   and while Σ_k c_k > n − 2 f:
        μ = Σ_k c_k Δ_k / Σ_k c_k
        λ, v = largest eigenvalue and its direction, of Σ_k c_k (Δ_k − μ)(Δ_k − μ)ᵀ / Σ_k c_k
        τ_k = ⟨Δ_k − μ, v⟩²,   c_k ← c_k (1 − τ_k / max τ)
    Δ = the μ with the smallest λ

The maximum is over the uploads with c_k > 0, so that every step removes one upload. Uploads
with a τ_k that differs from it by rounding only leave with it.

Departs from the authors' library: it approximates λ and v by one step of the power method from a
random direction. Here they are exact: they come from the n × n products of the uploads.
"""

import torch
from torch import Tensor

from pl_fed.aggregators.byzantine_count import ByzantineAwareAggregator
from pl_fed.functional.aggregation import gram_matrix, weighted_sum
from pl_fed.functional.selection import TIE
from pl_fed.types import RoundContext


class CAF(ByzantineAwareAggregator):
    """Covariance-bound-agnostic filter (CAF): the weighted mean with the least variance around it.

    The variance is the largest one over all directions. Source: Allouah et al., ICML 2025,
    Algorithm 2. Breakdown point: f < n / 3. It logs the number of uploads with weight 0 as
    ``"dropped"``.

    Args:
        num_byzantine: The assumed number of Byzantine uploads, the paper's f, at least 0. ``None``
            uses the number that the server expects; 0 gives the mean.

    Shape:
        - ``uploads``: [n, d], n at least 2 f + 1.
        - ``weights``: [n]; unused.
        - output: [d].

    Raises:
        ValueError: If ``num_byzantine`` is negative, there are too few uploads, or an upload is not
            finite.

    Example:
        >>> uploads = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [2.0, 90.0]])
        >>> context = RoundContext(num_byzantine=1, clients=torch.arange(4))
        >>> CAF()(uploads, torch.ones(4), context)[0]
        tensor(2.)
    """

    shards = True

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into a weighted mean [d]."""
        byzantine = self.resolve_num_byzantine(context)
        self.require_uploads(uploads, 2 * byzantine + 1)
        by_client = context.clients.to(uploads.device).argsort(stable=True)
        products = context.sum(gram_matrix(uploads, by_client))
        if not products.isfinite().all():
            raise self.overflow_error(uploads)
        shares_by_client = least_variance_weights(products.cpu(), len(uploads) - 2 * byzantine)
        shares = torch.empty_like(shares_by_client)
        shares[by_client.cpu()] = shares_by_client
        context.reject_rows(shares == 0)
        return weighted_sum(uploads, shares.to(uploads.device))

    def breakdown(self, num_uploads: int) -> int:
        """Return the largest f below n / 3, at most ``num_byzantine``.

        The result is bounded for every f below n / 2, but by a factor that grows with f / (n − 2
        f).
        """
        return self.limit_breakdown(max(0, (num_uploads - 1) // 3))


def least_variance_weights(products: Tensor, min_total: int) -> Tensor:
    """Return CAF's weights of the rows, computed from the products of all pairs of rows.

    Args:
        products: The Gram matrix, finite, float64 [n, n].
        min_total: The loop stops when the sum of the c_k is at most this number.

    Returns:
        Weights with sum 1, [n].
    """
    counts = torch.ones_like(products[0])
    best_shares, smallest = counts / len(counts), float("inf")
    while counts.sum() > min_total:
        shares = counts / counts.sum()
        along = products @ shares
        centred = products - along[:, None] - along + shares @ along
        roots = shares.sqrt()
        values, vectors = torch.linalg.eigh(roots[:, None] * centred * roots)
        if values[-1] < smallest:
            best_shares, smallest = shares, float(values[-1])
        # τ_k up to a common factor: the squared product of row k with Σ_j √shares_j v_j (Δ_j − μ)
        scores = (centred @ (roots * vectors[:, -1])).square()
        highest = scores[counts > 0].max()
        if not highest > 0:
            break
        factors = 1 - scores / highest
        counts = counts * torch.where(factors > TIE, factors, 0)
    return best_shares
