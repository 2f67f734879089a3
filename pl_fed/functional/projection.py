"""Sparse random projection with orthonormal rows: maps long rows to short ones, and back.

M. Charikar, K. Chen and M. Farach-Colton, "Finding frequent items in data streams", TCS 2004 (the
count sketch); K. Weinberger et al., "Feature hashing for large scale multitask learning", ICML
2009, arXiv 0902.2206. Each coordinate of the long row goes to one place of the short row, with a
random sign::

    (P x)_k = n_k^(-1/2) Σ_{j in bucket k} s_j x_j,     s_j = ±1, n_k = coordinates in bucket k

A dense P of 500 × 10⁶ numbers takes 2 GB, and as many multiplications for each product. The sparse
P takes few numbers and one addition for each coordinate.

Departs from the papers:

- The buckets have equal sizes, up to one coordinate. They come from a random permutation instead of
  independent draws, so no bucket is empty.
- The buckets are scaled, so that P Pᵀ = I. Then Pᵀ preserves lengths and angles, and Pᵀ P projects
  onto the span of the rows of P. If all buckets have one size, E ‖P x‖² = ‖x‖² · short / long for
  long rows x.
"""

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_integers
from pl_fed.random import key, random_bits


class SparseProjection(nn.Module):
    """Sparse projection P [short, long] with P Pᵀ = I, and one nonzero entry in each column.

    ``seed`` and the two lengths determine it, so it is not saved. It accepts stacks of rows and
    works under ``torch.vmap``. Its order of additions is fixed, and it is exact in float64.

    Args:
        long: Length of the long rows.
        short: Length of the short rows, from 1 to ``long``. If it equals ``long``, P permutes the
            coordinates and changes signs.
        seed: Seed of the buckets and the signs.

    Shape:
        - input: [..., long].
        - output: [..., short].

    Raises:
        ValueError: If a length is out of range.

    Example:
        >>> projection = SparseProjection(long=5, short=2, seed=0)
        >>> row = torch.ones(2)
        >>> projection(projection.lift(row)).allclose(row)
        True
    """

    order: Tensor
    bucket: Tensor
    signs: Tensor
    counts: Tensor

    def __init__(self, long: int, short: int, seed: int = 0) -> None:
        super().__init__()
        check_integers(1, long=long, short=short)
        if short > long:
            raise ValueError(
                f"Expected argument `short` to be at most `long` = {long} but got {short}."
            )
        self.short = short
        coordinates = torch.arange(long)
        order = random_bits(key(seed, "projection", long, short), coordinates).argsort(stable=True)
        place = coordinates % short  # the bucket of each coordinate in this order
        signs = (
            random_bits(key(seed, "projection signs", long, short), coordinates) & 1
        ) * 2.0 - 1.0
        buffers = {
            "order": order,
            "bucket": torch.empty_like(order).index_copy_(0, order, place),
            "signs": signs,  # separate from the counts: 1 / √n is not exact in every dtype
            "counts": torch.bincount(place).to(signs.dtype),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return P x [..., short] for rows x [..., long]."""
        mixed = (rows * self.signs).index_select(-1, self.order)
        padded = nn.functional.pad(mixed, (0, -rows.shape[-1] % self.short))
        sums = padded.reshape(*rows.shape[:-1], -1, self.short).sum(-2)
        return sums * self.counts.rsqrt()

    def lift(self, rows: Tensor) -> Tensor:
        """Return Pᵀ z [..., long] for rows z [..., short]."""
        return (rows * self.counts.rsqrt()).index_select(-1, self.bucket) * self.signs
