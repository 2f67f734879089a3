"""RFLBAT: project the uploads onto two components, and take the cluster of least similar ones.

Y. Wang, D. Zhai, Y. Zhan and Y. Xia, "RFLBAT: A Robust Federated Learning Algorithm against
Backdoor Attack", arXiv 2201.03772, 2022. With P_k the first two principal components::

    E_k = Σ_j ‖P_k − P_j‖;  leave out uploads with E_k > ε₁ median(E)
    clusters of the others by k-means on P, their number by the gap statistic
    score of a cluster = median over its uploads of their mean cosine to all of its uploads
    in the cluster with the lowest score, leave out uploads with E_k > ε₂ median(E), E within it
    Δ = mean of the others

The idea: benign uploads differ more from each other than forged ones. The cosines are those of the
uploads themselves. A cluster of one upload has score 1. Among equal scores, the larger cluster
wins, then the one with the smallest client id. If factors below 1 leave out all uploads, the result
is 0.

As in third-party code, there are 5 sets of reference points and up to 10 clusters. k-means has ten
starts, with the key of the seed and the round. Departs from that code:

- Uploads at the threshold stay. With a strict comparison, a cluster of one upload would be empty.
- The mean divides by the number of its uploads, and not by that of the cohort.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_integers, check_positive
from pl_fed.functional.aggregation import (
    centred_gram_matrix,
    cosine_distances,
    gram_matrix,
    merging_dtype,
    subset_mean,
)
from pl_fed.functional.clustering import Array, count_clusters, find_clusters
from pl_fed.functional.selection import complement_mask
from pl_fed.nets.rows import RowLayout
from pl_fed.random import key, numpy_generator
from pl_fed.types import RoundContext

_NUM_REFERENCES = 5
_DECIMALS = 9  # of a score: rounding decides between no equal ones


class RFLBAT(Aggregator):
    """RFLBAT: mean of the cluster whose uploads are least similar to each other.

    Source: Wang et al., arXiv 2201.03772. Breakdown point: 0, because forged uploads that differ
    from each other may be the chosen cluster. It logs the uploads outside of it as ``"dropped"``.
    With fewer than three uploads there is one cluster.

    Args:
        first_factor: ε₁ > 0, the largest total distance of an upload in medians of all.
        second_factor: ε₂ > 0, the largest total distance within the cluster, in medians of it.
        max_clusters: The largest number of clusters, at least 1.
        layers: Names of the tensors or submodules that it compares; ``None`` for all.

    Shape:
        - ``uploads``: [n, d], n at least 1, finite.
        - ``weights``: [n]; unused.
        - output: [d]; 0 if no upload remains.

    Raises:
        ValueError: If an argument is out of range, there is no upload, or an upload is not finite.
            With ``layers``, if a layer has no tensor, or the context lacks the layout.

    Example:
        >>> uploads = torch.tensor([[1.0, 0.0], [1.0, 0.5], [0.5, -0.5], [-9.0, 9.0], [-9.0, 9.1]])
        >>> RFLBAT()(uploads, torch.ones(5), RoundContext(clients=torch.arange(5)))
        tensor([0.8333, 0.0000])
    """

    def __init__(
        self,
        first_factor: float = 10.0,
        second_factor: float = 4.0,
        max_clusters: int = 10,
        layers: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        check_positive(first_factor=first_factor, second_factor=second_factor)
        check_integers(1, max_clusters=max_clusters)
        self.first_factor = first_factor
        self.second_factor = second_factor
        self.max_clusters = max_clusters
        self.layers = None if layers is None else tuple(layers)

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into the mean of the chosen cluster [d]."""
        self.require_uploads(uploads)
        compared = self._select_layers(uploads, context)
        by_client = context.clients.to(uploads.device).argsort(stable=True)
        products = gram_matrix(compared, by_client)
        centred = centred_gram_matrix(compared, by_client)
        if not (products.isfinite().all() and centred.isfinite().all()):
            raise self.overflow_error(uploads)
        cosines = (1 - cosine_distances(products)).cpu().numpy()
        points = principal_components(centred.cpu()).numpy()
        rows = self._choose(points, cosines, context)
        accepted = by_client[torch.from_numpy(rows).to(by_client.device)]
        context.reject_rows(complement_mask(accepted, len(uploads)))
        if not len(accepted):
            return uploads.new_zeros(uploads.shape[1], dtype=merging_dtype(uploads))
        return subset_mean(uploads, accepted)

    def list_compared_positions(self, layout: RowLayout) -> Tensor | None:
        """Return the positions of ``layers``; ``None`` for all."""
        return None if self.layers is None else layout.positions(*self.layers)

    def _select_layers(self, uploads: Tensor, context: RoundContext) -> Tensor:
        """Return the compared coordinates of the uploads [n, f]."""
        if self.layers is None:
            return uploads
        if context.layout is not None:  # names are refused even if a trial's rows are short
            positions = context.layout.positions(*self.layers)
        self.require_layout(uploads, context)
        return uploads[:, positions.to(uploads.device)]

    def _choose(self, points: Array, cosines: Array, context: RoundContext) -> Array:
        """Return the rows of the chosen cluster, by points [n, 2] and cosines [n, n]; or none."""
        rows = _exclude_far(np.arange(len(points)), points, self.first_factor)
        if not len(rows):
            return rows
        draw = numpy_generator(key(context.seed, "rflbat", context.round))
        count = count_clusters(points[rows], self.max_clusters, _NUM_REFERENCES, draw)
        labels = find_clusters(points[rows][None], count, draw)[0][0]
        clusters = [rows[labels == label] for label in np.unique(labels)]
        best = min(clusters, key=lambda cluster: _rank(cluster, cosines))
        return _exclude_far(best, points, self.second_factor)

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: a cluster of forged uploads may be the chosen one, with any values."""
        return 0


def principal_components(centred: Tensor) -> Tensor:
    """Return the first two principal components of rows, from the products of centred rows.

    The largest number of a component is positive.

    Args:
        centred: The Gram matrix of the rows minus their mean, [n, n].

    Returns:
        Shape [n, 2]; 0 for components that do not exist.

    Example:
        >>> rows = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        >>> principal_components(rows @ rows.T).abs()[:2]
        tensor([[2.0000, 0.0000],
                [2.0000, 0.0000]])
    """
    scale = centred.diagonal().max()
    if not scale:
        return centred.new_zeros(len(centred), 2)
    values, vectors = torch.linalg.eigh(centred / scale)
    components = vectors.flip(1)[:, :2] * (values.flip(0)[:2].clamp(min=0).sqrt() * scale.sqrt())
    extremes = components.gather(0, components.abs().argmax(0, keepdim=True))
    components = components * torch.where(extremes < 0, -1, 1)
    return torch.nn.functional.pad(components, (0, 2 - components.shape[1]))


def _exclude_far(rows: Array, points: Array, factor: float) -> Array:
    """Return the rows whose total distance to the others is at most a multiple of the median."""
    own = points[rows]
    totals = np.linalg.norm(own[:, None] - own, axis=2).sum(1)
    near: Array = rows[totals <= factor * np.median(totals)]
    return near


def _rank(cluster: Array, cosines: Array) -> tuple[float, int, int]:
    """Return the score of a cluster, and what decides among equal scores."""
    score = 1.0
    if len(cluster) > 1:
        score = float(np.median(cosines[np.ix_(cluster, cluster)].mean(1)))
    return round(score, _DECIMALS), -len(cluster), int(cluster[0])
