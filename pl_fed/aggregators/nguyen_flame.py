"""FLAME of Nguyen et al.: cluster the clients' models, clip their uploads, and add noise.

This is not the ADMM algorithm FLAME of ``pl_fed.clients``; only the names are equal.

T. D. Nguyen, P. Rieger, H. Chen, H. Yalame, H. Möllering, H. Fereidooni, S. Marchal, M. Miettinen,
A. Mirhoseini, S. Zeitouni, F. Koushanfar, A.-R. Sadeghi and T. Schneider, "FLAME: Taming Backdoors
in Federated Learning", USENIX Security 2022, arXiv 2101.02281. With the models L_k = w^t + Δ_k::

    c_ij = 1 − cos(L_i, L_j)
    A = the cluster of HDBSCAN with more than n / 2 models, by these distances
    S = median of ‖Δ_k‖ over all k
    Δ = mean of Δ_k · min(1, S / ‖Δ_k‖) over k in A  +  N(0, (λ S)²) in each coordinate

With one neighbour for core distances, the cluster is the smallest component of single linkage with
more than n / 2 models. It needs no library, and is never empty. The median of an even number of
norms is the mean of the two middle ones. The noise has the key of the seed and the round.

The paper computes λ from a privacy budget. Here it is an argument; 0.001 is the value of the
benchmarks for images. Departs from benchmarks: FLPoison and BackFed multiply the noise by the
standard deviation of each tensor, and BackFed compares the last layers only.
"""

import torch
from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_nonnegative
from pl_fed.functional.aggregation import (
    clip_and_average,
    cosine_distances,
    gram_matrix,
    squared_norms,
)
from pl_fed.functional.selection import majority_component
from pl_fed.random import key, normal_row
from pl_fed.types import RoundContext


class NguyenFlame(Aggregator):
    """Nguyen's FLAME: noisy mean of the clipped uploads in the majority's cluster of models.

    Source: Nguyen et al., USENIX Security 2022. It is not the ADMM algorithm FLAME of
    ``pl_fed.clients``. Breakdown point: f < n / 2, because S is a median of the norms. The noise
    adds a row of norm λ S √d. It logs the uploads outside the cluster as ``"dropped"``, and the
    clipped ones in it as ``"clipped"``.

    Args:
        noise: λ ≥ 0, the standard deviation of the noise in medians of the norms.

    Shape:
        - ``uploads``: [n, d], n at least 1; ``context.broadcast``: [d].
        - ``weights``: [n]; unused.
        - output: [d].

    Raises:
        ValueError: If ``noise`` is negative, there is no upload, or the broadcast has another
            length.

    Example:
        >>> uploads = torch.tensor([[1.0, 0.0], [0.8, 0.0], [-2.0, 1.0]])
        >>> context = RoundContext(clients=torch.arange(3), broadcast=torch.ones(2))
        >>> NguyenFlame(noise=0.0)(uploads, torch.ones(3), context)
        tensor([0.9000, 0.0000])
    """

    def __init__(self, noise: float = 0.001) -> None:
        super().__init__()
        check_nonnegative(noise=noise)
        self.noise = noise

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into the noisy clipped mean of the majority's cluster [d]."""
        self.require_uploads(uploads)
        broadcast = self.require_broadcast(uploads, context)
        by_client = context.clients.to(uploads.device).argsort(stable=True)
        sent, received = context.select_sent(uploads), context.select_sent(broadcast)
        products = gram_matrix(sent, by_client, centre=-received)
        accepted = torch.zeros(len(uploads), dtype=torch.bool, device=uploads.device)
        accepted[by_client] = majority_component(cosine_distances(products))
        norms = squared_norms(uploads).sqrt()
        bound = norms.nan_to_num(torch.inf, torch.inf).quantile(0.5)
        context.reject_rows(~accepted)
        context.note("clipped", (accepted & (norms > bound)).sum())
        merged = clip_and_average(uploads, accepted, norms, bound)
        if self.noise:
            row = normal_row(key(context.seed, "nguyen flame", context.round), len(merged))
            merged += (self.noise * bound) * row.to(merged.device)
        return merged

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: a forged upload in the cluster may have any direction."""
        return 0

    def breakdown(self, num_uploads: int) -> int:
        """Return the largest minority: the clipped mean is no longer than the median norm."""
        return max(0, (num_uploads - 1) // 2)
