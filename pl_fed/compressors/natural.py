"""Natural compression: random rounding to powers of two.

S. Horváth, C.-Y. Ho, Ľ. Horváth, A. N. Sahu, M. Canini and P. Richtárik, "Natural Compression for
Distributed Deep Learning", MSML 2022, arXiv 1905.10988, Definition 1. For 2^a ≤ |x_i| ≤ 2^(a+1)::

    C(x)_i = sign(x_i) 2^(a+1)   with probability  |x_i| / 2^a − 1
    C(x)_i = sign(x_i) 2^a       otherwise

    E[C(x)] = x,   E‖C(x) − x‖² ≤ ‖x‖² / 8                              (Theorem 1)

A message has a sign and an exponent for each coordinate: 9 bits for float32, 12 for float64.
"""

import torch
from torch import Tensor

from pl_fed.compressors.base import Compressor, Sending
from pl_fed.nets.rows import RowLayout
from pl_fed.random import uniforms

_EXPONENT_BITS = {16: 8, 32: 8, 64: 11}  # bfloat16's for 16 bits, which is the larger


class NaturalCompression(Compressor):
    """Natural compression: rounds each coordinate at random to a neighbouring power of two.

    Source: Horváth et al., MSML 2022. It is unbiased, and keeps no memory.

    Example:
        >>> layout = RowLayout.from_tensors({"weight": torch.zeros(1000)}.items())
        >>> NaturalCompression().count_bits(layout, 32)
        9000
    """

    is_unbiased = True

    def compress(self, rows: Tensor, sending: Sending) -> Tensor:
        """Return the rows, rounded at random to powers of two."""
        mantissa, exponent = torch.frexp(rows)  # |mantissa| in [1/2, 1), or 0
        draws = uniforms(sending.keys, torch.arange(rows.shape[1], device=rows.device))
        is_upper = draws < 2 * mantissa.abs() - 1
        return torch.ldexp(mantissa.sign() / 2, exponent + is_upper.to(exponent.dtype))

    def count_bits(self, layout: RowLayout, number_bits: int) -> int:
        """Return d (1 + bits of an exponent)."""
        return layout.numel * (1 + _EXPONENT_BITS[number_bits])
