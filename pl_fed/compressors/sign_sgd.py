"""SignSGD with a scale: the sign of each coordinate, and their mean absolute value.

J. Bernstein, Y.-X. Wang, K. Azizzadenesheli and A. Anandkumar, "signSGD: Compressed Optimisation
for Non-Convex Problems", ICML 2018, arXiv 1802.04434; with scale and error feedback S. P.
Karimireddy, Q. Rebjock, S. U. Stich and M. Jaggi, "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", ICML 2019, arXiv 1901.09847, Algorithm 1 (EF-signSGD)::

    C(x) = (‖x‖₁ / d) sign(x)
    ‖C(x) − x‖² = (1 − ‖x‖₁² / (d ‖x‖²)) ‖x‖²                        (Lemma 8)

sign(0) is 1, so that a message has d + b bits for numbers of b bits.

Departs from Bernstein et al.: their server takes the sign of the sum of signs, and each step has
the same length. Here the federation's aggregator merges C(x).
"""

from torch import Tensor

from pl_fed.compressors.base import Compressor, Sending
from pl_fed.nets.rows import RowLayout


class SignSGD(Compressor):
    """SignSGD with a scale: sends the signs of an upload and its mean absolute value.

    Sources: Bernstein et al., ICML 2018; Karimireddy et al., ICML 2019. It is biased, and a
    contraction with δ = ‖x‖₁² / (d ‖x‖²) in [1/d, 1].

    Args:
        error_feedback: Whether a client adds the unsent parts of earlier uploads (EF-signSGD). Its
            memory is as long as the upload.

    Example:
        >>> SignSGD().error_feedback
        True
    """

    def __init__(self, error_feedback: bool = True) -> None:
        self.error_feedback = error_feedback

    def compress(self, rows: Tensor, sending: Sending) -> Tensor:
        """Return the rows' signs times their mean absolute values."""
        scale = rows.abs().mean(dim=1, keepdim=True)
        return scale.where(rows >= 0, -scale)

    def count_bits(self, layout: RowLayout, number_bits: int) -> int:
        """Return d + b."""
        return layout.numel + number_bits
