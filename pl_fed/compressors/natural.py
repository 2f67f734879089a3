"""Natural compression: random rounding to powers of two.

S. Horváth, C.-Y. Ho, Ľ. Horváth, A. N. Sahu, M. Canini and P. Richtárik, "Natural Compression for
Distributed Deep Learning", MSML 2022, arXiv 1905.10988, Definition 1. For 2^a ≤ |x_i| ≤ 2^(a+1)::

    C(x)_i = sign(x_i) 2^(a+1)   with probability  |x_i| / 2^a − 1
    C(x)_i = sign(x_i) 2^a       otherwise

    E[C(x)] = x,   E‖C(x) − x‖² ≤ ‖x‖² / 8                              (Theorem 1)

A message has a sign and an exponent for each coordinate: 9 bits for float32, 12 for float64. A
number below the smallest normal number of its type is rounded to that number, or to 0.
"""

import torch
from torch import Tensor

from pl_fed.compressors.base import Compressor, Sending
from pl_fed.nets.rows import RowLayout
from pl_fed.random import uniforms

_EXPONENTS = {
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
}
"""The integers as long as a number, and the bits of its exponent in them."""

_EXPONENT_BITS = {16: 8, 32: 8, 64: 11}  # bfloat16's for 16 bits, the larger of the two


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
        integers, exponent_bits = _EXPONENTS[rows.dtype]
        lower = (rows.view(integers) & exponent_bits).view(rows.dtype)  # 2^a; 0 if |x| is subnormal
        upper = (2 * lower).clamp(min=torch.finfo(rows.dtype).tiny)
        draws = uniforms(sending.keys, torch.arange(rows.shape[1], device=rows.device))
        is_upper = draws < (rows.abs() - lower) / (upper - lower)
        return rows.sign() * upper.where(is_upper, lower)

    def count_bits(self, layout: RowLayout, number_bits: int) -> int:
        """Return d (1 + bits of an exponent)."""
        return layout.numel * (1 + _EXPONENT_BITS[number_bits])
