"""FreqFed: cluster the clients' models by their low frequencies.

H. Fereidooni, A. Pegoraro, P. Rieger, A. Dmitrienko and A.-R. Sadeghi, "FreqFed: A Frequency
Analysis-Based Approach for Mitigating Poisoning Attacks in Federated Learning", NDSS 2024,
arXiv 2312.04432. With the models L_k = w^t + Δ_k as square matrices, zeros at the end::

    V_k = the orthonormal DCT-II of L_k,    F_k = its entries (p, q) with p + q ≤ side / 2
    A = the cluster of HDBSCAN with more than n / 2 clients, by 1 − cos(F_i, F_j)
    Δ = mean of Δ_k over k in A

The cluster is the one of :class:`NguyenFlame`; there is no clipping and no noise. The parameters
that clients send fill the matrix in the order of the upload, row by row. Third-party code also has
a transform of the flat row, with the lower half of the frequencies: ``transform="row"``.
"""

import math
from typing import Literal

import numpy as np
import torch
from scipy.fft import dct, dctn
from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_choice
from pl_fed.functional.aggregation import cosine_distances, gram_matrix, subset_mean
from pl_fed.functional.clustering import Array
from pl_fed.functional.selection import complement_mask, majority_component
from pl_fed.types import RoundContext


class FreqFed(Aggregator):
    """FreqFed: mean of the majority's cluster of models by their low frequencies.

    Source: Fereidooni et al., NDSS 2024. Breakdown point: 0, because an upload in the cluster may
    have any length; :class:`Clipping` in front bounds it. It logs the uploads outside the cluster
    as ``"dropped"``. The transform takes O(d log d) steps for each upload, on the CPU.

    Args:
        transform: ``"matrix"`` for the transform of a square matrix, as in the paper, or ``"row"``
            for the transform of the flat row.

    Shape:
        - ``uploads``: [n, d], n at least 1, finite; ``context.broadcast``: [d].
        - ``weights``: [n]; unused.
        - output: [d].

    Raises:
        ValueError: If an argument is unknown, there is no upload, or the broadcast has another
            length. If an upload or the squares of its frequencies are not finite.

    Example:
        >>> uploads = torch.tensor([[1.0, 0, 0, 0], [0.8, 0, 0, 0], [-2.0, 1, 0, 0]])
        >>> context = RoundContext(clients=torch.arange(3), broadcast=torch.ones(4))
        >>> FreqFed()(uploads, torch.ones(3), context)
        tensor([0.9000, 0.0000, 0.0000, 0.0000])
    """

    def __init__(self, transform: Literal["matrix", "row"] = "matrix") -> None:
        super().__init__()
        check_choice(("matrix", "row"), transform=transform)
        self.transform = transform

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into the mean of the majority's cluster [d]."""
        self.require_uploads(uploads)
        broadcast = self.require_broadcast(uploads, context).cpu().double()
        by_client, on_cpu = context.clients.argsort(stable=True), uploads.cpu()
        find = low_matrix_frequencies if self.transform == "matrix" else low_row_frequencies
        rows = [
            torch.from_numpy(find(context.select_sent(on_cpu[row].double() + broadcast).numpy()))
            for row in by_client.tolist()
        ]
        products = gram_matrix(torch.stack(rows))
        if not products.isfinite().all():
            raise self.overflow_error(uploads)
        component = majority_component(cosine_distances(products))
        accepted = by_client[component].to(uploads.device)
        context.reject_rows(complement_mask(accepted, len(uploads)))
        return subset_mean(uploads, accepted.sort().values)

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: a forged upload in the cluster may have any length."""
        return 0


def low_matrix_frequencies(row: Array) -> Array:
    """Return the low frequencies of a row as a square matrix: (p, q) with p + q ≤ side / 2.

    Args:
        row: Shape [d]; zeros at the end fill the square.

    Example:
        >>> low_matrix_frequencies(np.arange(1.0, 10.0)).round(6)
        array([15.      , -2.44949 , -7.348469])
    """
    side = math.isqrt(max(0, len(row) - 1)) + 1
    matrix = np.zeros(side * side)
    matrix[: len(row)] = row
    frequencies: Array = dctn(matrix.reshape(side, side), norm="ortho")
    sums = np.add.outer(np.arange(side), np.arange(side))
    low: Array = frequencies[sums <= side // 2]
    return low


def low_row_frequencies(row: Array) -> Array:
    """Return the low frequencies of a flat row: those with an index up to d / 2.

    Args:
        row: Shape [d].

    Example:
        >>> low_row_frequencies(np.array([1.0, 2.0, 3.0, 4.0])).round(6)
        array([ 5.      , -2.230442,  0.      ])
    """
    if not len(row):
        return row
    low: Array = dct(row, norm="ortho")[: len(row) // 2 + 1]
    return low
