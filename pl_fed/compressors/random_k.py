"""Random-k: k random coordinates of an upload.

S. U. Stich, J.-B. Cordonnier and M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv
1809.07599, Definition 2.2; for the unbiased form J. Konečný et al., "Federated Learning: Strategies
for Improving Communication Efficiency", arXiv 1610.05492, section 3 ("random mask"). For a set S of
k coordinates, uniform among all sets of k::

    C(x)_i = x_i if i ∈ S, else 0           with error feedback:  E‖C(x) − x‖² = (1 − k/d) ‖x‖²
    C(x)_i = (d/k) x_i if i ∈ S, else 0     without it:  E[C(x)] = x,
                                            E‖C(x) − x‖² = (d/k − 1) ‖x‖²

The server knows the key of a client's draws, and so the set: a message has k numbers, k b bits.
"""

import torch
from torch import Tensor

from pl_fed.compressors.base import Compressor, Sending, check_count, check_count_fits, count_sent
from pl_fed.nets.rows import RowLayout
from pl_fed.random import random_bits


class RandomK(Compressor):
    """Random-k: sends k coordinates of an upload, drawn for each client and round.

    Sources: Stich et al., NeurIPS 2018; Konečný et al., arXiv 1610.05492.

    Args:
        k: The number of coordinates (int), or their share in (0, 1] (float).
        error_feedback: Whether a client adds the unsent parts of earlier uploads. Without it, the
            coordinates are multiplied by d/k, so that the codec is unbiased.

    Raises:
        TypeError: If ``k`` is no number.
        ValueError: If ``k`` is out of range; before training, if it is above d.

    Example:
        >>> RandomK(k=5, error_feedback=False).is_unbiased
        True
    """

    def __init__(self, k: int | float = 0.01, error_feedback: bool = True) -> None:
        check_count(k)
        self.k = k
        self.error_feedback = error_feedback
        self.is_unbiased = not error_feedback

    def check(self, layout: RowLayout) -> None:
        """Refuse more coordinates than an upload has."""
        check_count_fits(self.k, layout)

    def compress(self, rows: Tensor, sending: Sending) -> Tensor:
        """Return the rows with zeros outside of k drawn coordinates."""
        d = rows.shape[1]
        k = count_sent(self.k, d)
        draws = random_bits(sending.keys, torch.arange(d, device=rows.device))
        positions = draws.topk(k, dim=1, sorted=False).indices
        values = rows.gather(1, positions)
        if not self.error_feedback:
            values = values * (d / k)
        return rows.new_zeros(rows.shape).scatter_(1, positions, values)

    def count_bits(self, layout: RowLayout, number_bits: int) -> int:
        """Return k b."""
        return count_sent(self.k, layout.numel) * number_bits
