"""Top-k: an upload's k coordinates with the largest absolute values.

A. F. Aji and K. Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017,
arXiv 1704.05021; S. U. Stich, J.-B. Cordonnier and M. Jaggi, "Sparsified SGD with Memory", NeurIPS
2018, arXiv 1809.07599, Definition 2.2::

    C(x)_i = x_i if |x_i| is among the k largest of |x|, else 0
    ‖C(x) − x‖² ≤ (1 − k/d) ‖x‖²                                   (Lemma A.1)

A message has k numbers and their positions: k (b + ⌈log₂ d⌉) bits for numbers of b bits; or k b + d
bits with a bit for each coordinate, if that is shorter.
"""

from torch import Tensor

from pl_fed.compressors.base import Compressor, Sending, check_count, check_count_fits, count_sent
from pl_fed.nets.rows import RowLayout


class TopK(Compressor):
    """Top-k: sends the k coordinates of an upload with the largest absolute values.

    Sources: Aji and Heafield, EMNLP 2017; Stich et al., NeurIPS 2018. It is biased, and a
    contraction with δ = k/d.

    Args:
        k: The number of coordinates (int), or their share in (0, 1] (float).
        error_feedback: Whether a client adds the unsent parts of earlier uploads. Its
            memory is as long as the upload.

    Raises:
        TypeError: If ``k`` is no number.
        ValueError: If ``k`` is out of range; before training, if it is above d.

    Example:
        >>> TopK(k=0.01).constructor_arguments
        {'k': 0.01, 'error_feedback': True}
    """

    def __init__(self, k: int | float = 0.01, error_feedback: bool = True) -> None:
        check_count(k)
        self.k = k
        self.error_feedback = error_feedback

    def check(self, layout: RowLayout) -> None:
        """Refuse more coordinates than an upload has."""
        check_count_fits(self.k, layout)

    def compress(self, rows: Tensor, sending: Sending) -> Tensor:
        """Return the rows with zeros outside of their k largest coordinates."""
        k = count_sent(self.k, rows.shape[1])
        positions = rows.abs().topk(k, dim=1, sorted=False).indices
        return rows.new_zeros(rows.shape).scatter_(1, positions, rows.gather(1, positions))

    def count_bits(self, layout: RowLayout, number_bits: int) -> int:
        """Return k b + min(k ⌈log₂ d⌉, d)."""
        d = layout.numel
        k = count_sent(self.k, d)
        return k * number_bits + min(k * (d - 1).bit_length(), d)
