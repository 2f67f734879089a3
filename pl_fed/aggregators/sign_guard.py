"""SignGuard: remove uploads with an unusual norm or unusual signs.

J. Xu, S.-L. Huang, L. Song and T. Lan, "Byzantine-Robust Federated Learning through Collaborative
Malicious Gradient Filtering", ICDCS 2022, arXiv 2109.05872. With M the median of the norms::

    S₁ = the uploads with L ≤ ‖Δ_k‖ / M ≤ R
    S₂ = the largest cluster of the uploads by their shares of positive, zero and negative numbers,
         on coordinates that are drawn at random
    Δ = mean of Δ_k · min(1, M / ‖Δ_k‖)   over k in S₁ ∩ S₂

The clusters come from mean shift, by scikit-learn. SignGuard-Sim adds one feature for the clusters:
the similarity of an upload to the others. If no upload is in both sets, the result is 0.

As in the authors' code:

- L, R and the share of the coordinates.
- The bandwidth of the clusters: the mean distance to the farthest of the nearest half of the
  uploads.
- An upload that is near no cluster belongs to none.

Departs from the authors' code:

- It takes the coordinates in one block; here they are drawn one by one.
- It divides each share by the largest share of all uploads.
- M is its lower one of the two middle norms; here it is their mean.
- It measures the bandwidth on 50 uploads at most.
- Its mean shift starts from bins; here it starts from every upload.
- Its SignGuard-Sim compares uploads with the last result after the first rounds, and scales
  similarities to [0, 0.2]. Here the similarity is always the median of the cosines to all uploads.

FLPoison's follows the authors' code in the block, the division and M. It has no similarity, and
DBSCAN (ε = 0.05, 3 uploads) as an option for the clusters. If no upload passes, its result is NaN.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_positive
from pl_fed.functional.aggregation import gram_matrix, sign_counts, squared_norms, weighted_sum
from pl_fed.random import generator
from pl_fed.types import RoundContext

_NEAREST_SHARE = 0.5  # share of the uploads whose distances determine the bandwidth
_MIN_BANDWIDTH = 1e-7  # for equal uploads: above the rounding of scikit-learn's distances


class SignGuard(Aggregator):
    """SignGuard: mean of the clipped uploads, without those of unusual norms or signs.

    Source: Xu et al., ICDCS 2022. Breakdown point: f < n / 2. It logs the removed uploads as
    ``"dropped"``, and the clipped ones among the others as ``"clipped"``. Clusters need at least
    four uploads. With fewer, uploads with different shares of signs are clusters of their own.

    It takes 10 times as long as the mean (0.12 s for 100 uploads of 3,274,634 numbers, on one CPU
    thread), and 30 to 40 times as long with ``similarity``.

    Args:
        lower: L ≥ 0, in medians of the norms.
        upper: R ≥ ``lower``, in medians of the norms.
        coordinates: The share of coordinates in the comparison of signs, in (0, 1]. With 1 the
            aggregator works on slices of the coordinates.
        similarity: Whether the clusters also use the similarity to the other uploads, as in
            SignGuard-Sim.

    Shape:
        - ``uploads``: [n, d], n at least 1.
        - ``weights``: [n]; unused.
        - output: [d]; 0 if no upload passes.

    Raises:
        ValueError: If an argument is out of range, or there is no upload.

    Example:
        >>> uploads = torch.tensor([[1.0, 1.0], [1.0, 2.0], [2.0, 1.0], [-1.0, -2.0], [90.0, 90.0]])
        >>> context = RoundContext(clients=torch.arange(5))
        >>> SignGuard(coordinates=1.0)(uploads, torch.ones(5), context)
        tensor([1.3333, 1.3333])
    """

    def __init__(
        self,
        lower: float = 0.1,
        upper: float = 3.0,
        coordinates: float = 0.1,
        similarity: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= lower <= upper < math.inf:
            raise ValueError(
                "Expected arguments `lower` and `upper` to be finite with 0 <= lower <= upper but"
                f" got {lower} and {upper}."
            )
        check_positive(coordinates=coordinates)
        if coordinates > 1:
            raise ValueError(
                f"Expected argument `coordinates` to be at most 1 but got {coordinates}."
            )
        self.lower = lower
        self.upper = upper
        self.coordinates = coordinates
        self.similarity = similarity
        self.shards = coordinates == 1

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into the clipped mean of the uploads that pass [d]."""
        self.require_uploads(uploads)
        norms = context.sum(squared_norms(uploads)).sqrt()
        median = norms.nan_to_num(math.inf, math.inf).quantile(0.5)
        passes = (norms >= self.lower * median) & (norms <= self.upper * median)
        passes &= norms.isfinite() & self._find_largest_cluster(uploads, context)
        is_clipped = passes & (norms > median)
        context.reject_rows(~passes)
        context.note("clipped", is_clipped.sum())
        factors = torch.where(is_clipped, median / norms, 1.0)[passes]
        return weighted_sum(uploads[passes], factors / max(1, len(factors)))

    def _find_largest_cluster(self, uploads: Tensor, context: RoundContext) -> Tensor:
        """Return a mask of the uploads in the largest cluster, bool [n]."""
        by_client = context.clients.argsort(stable=True).to(uploads.device)
        features = [self._sign_shares(uploads, context)]
        if self.similarity:
            features.append(_median_cosines(context.sum(gram_matrix(uploads)))[:, None])
        ordered = torch.cat(features, 1)[by_client].cpu().numpy()
        in_cluster = torch.zeros(len(uploads), dtype=torch.bool, device=uploads.device)
        in_cluster[by_client] = torch.from_numpy(largest_cluster(ordered)).to(uploads.device)
        return in_cluster

    def _sign_shares(self, uploads: Tensor, context: RoundContext) -> Tensor:
        """Return the shares of positive, zero and negative numbers [n, 3], in float64."""
        num_unsent = len(context.unsent)
        if self.coordinates < 1:
            uploads, num_unsent = context.select_sent(uploads), 0
            d = uploads.shape[1]
            draw = generator(context.seed, "signguard", context.round)
            coordinates = torch.randperm(d, generator=draw)[: math.ceil(self.coordinates * d)]
            uploads = uploads[:, coordinates.sort().values.to(uploads.device)]
        counts = context.sum(sign_counts(uploads))
        if num_unsent:  # parameters that clients keep to themselves are no zeros
            counts = counts - counts.new_tensor([0.0, num_unsent, 0.0])
        return counts / counts.sum(1, keepdim=True).clamp(min=1)

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: a forged upload with the signs of the benign ones may have any values."""
        return 0

    def breakdown(self, num_uploads: int) -> int:
        """Return the largest minority: the result is never longer than the median of the norms."""
        return max(0, (num_uploads - 1) // 2)


def _median_cosines(products: Tensor) -> Tensor:
    """Return the median of each row's cosines to all rows, from the products of the rows; [n]."""
    norms = products.diagonal().sqrt()
    cosines = products / (norms[:, None] * norms)
    return cosines.nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1).quantile(0.5, dim=1)


def largest_cluster(features: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a mask of the points in the largest cluster that mean shift finds, bool [n].

    Among equally large clusters, the densest wins.

    Args:
        features: Points, [n, number of features].

    Example:
        >>> largest_cluster(np.array([[0.0], [0.1], [0.1], [0.2], [5.0]]))
        array([ True,  True,  True,  True, False])
    """
    from sklearn.cluster import MeanShift, estimate_bandwidth  # slow to import

    bandwidth = max(float(estimate_bandwidth(features, quantile=_NEAREST_SHARE)), _MIN_BANDWIDTH)
    starts = np.unique(features, axis=0)  # equal points shift to the same mean
    labels = MeanShift(bandwidth=bandwidth, seeds=starts, cluster_all=False).fit(features).labels_
    largest: np.ndarray[Any, Any] = labels == np.bincount(labels[labels >= 0]).argmax()
    return largest
