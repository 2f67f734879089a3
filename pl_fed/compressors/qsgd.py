"""QSGD: coordinates as random multiples of the norm.

D. Alistarh, D. Grubic, J. Li, R. Tomioka and M. Vojnovic, "QSGD: Communication-Efficient SGD via
Gradient Quantization and Encoding", NeurIPS 2017, arXiv 1610.02132, section 3.1. With s levels and
ℓ = ⌊s |x_i| / ‖x‖⌋::

    C(x)_i = ‖x‖ sign(x_i) (ℓ + 1)/s   with probability  s |x_i| / ‖x‖ − ℓ
    C(x)_i = ‖x‖ sign(x_i) ℓ/s         otherwise

    E[C(x)] = x,   E‖C(x) − x‖² ≤ min(d/s², √d/s) ‖x‖²                   (Lemma 3.1)

With buckets (section 4, "bucketing"), each run of B coordinates has its own norm, and B replaces d
in the bound.

Departs from the paper: a message has a fixed length, ⌈d/B⌉ norms of b bits, and for each coordinate
a sign and a level in ⌈log₂(s + 1)⌉ bits. Elias coding would shorten messages of few levels.
"""

import torch
from torch import Tensor

from pl_fed.arguments import check_integers
from pl_fed.compressors.base import Compressor, Sending
from pl_fed.nets.rows import RowLayout
from pl_fed.random import uniforms


class QSGD(Compressor):
    """QSGD: rounds each coordinate at random to a multiple of norm / levels.

    Source: Alistarh et al., NeurIPS 2017. It is unbiased, and keeps no memory.

    Args:
        levels: s, the number of levels above 0: 127 gives 8 bits a coordinate, 7 gives 4 bits, and
            1 gives 2 bits.
        bucket_size: B, the number of coordinates with a common norm; ``None`` for one norm.

    Raises:
        ValueError: If an argument is below 1.

    Example:
        >>> layout = RowLayout.from_tensors({"weight": torch.zeros(1000)}.items())
        >>> QSGD(levels=7).count_bits(layout, 32), 32 * 1000
        (4032, 32000)
    """

    is_unbiased = True

    def __init__(self, levels: int = 127, bucket_size: int | None = None) -> None:
        check_integers(1, levels=levels)
        if bucket_size is not None:
            check_integers(1, bucket_size=bucket_size)
        self.levels = levels
        self.bucket_size = bucket_size

    def compress(self, rows: Tensor, sending: Sending) -> Tensor:
        """Return the rows, rounded at random to multiples of their buckets' norms / levels."""
        n, d = rows.shape
        size = min(self.bucket_size or d, d)
        padding = -d % size
        buckets = torch.nn.functional.pad(rows, (0, padding)).view(n, -1, size)
        # the norm relative to the largest number: squares of large numbers would overflow
        largest = buckets.abs().amax(dim=2, keepdim=True)
        largest = largest.where(largest > 0, 1.0)
        norms = largest * torch.linalg.vector_norm(buckets / largest, dim=2, keepdim=True)
        places = self.levels * (buckets.abs() / norms.where(norms > 0, 1.0)).clamp(max=1.0)
        lower = places.floor()
        counters = torch.arange(d + padding, device=rows.device)
        draws = uniforms(sending.keys, counters).view_as(buckets)
        level = lower + (draws < places - lower)
        received: Tensor = buckets.sign() * norms * (level / self.levels)
        return received.view(n, -1)[:, :d]

    def count_bits(self, layout: RowLayout, number_bits: int) -> int:
        """Return ⌈d/B⌉ b + d (1 + ⌈log₂(s + 1)⌉)."""
        d = layout.numel
        num_buckets = -(-d // min(self.bucket_size or d, d))
        return num_buckets * number_bits + d * (1 + self.levels.bit_length())
