"""A sparse random projection with orthonormal rows: long rows to short ones, and back.

M. Charikar, K. Chen and M. Farach-Colton, "Finding frequent items in data streams", TCS 2004 (the
count sketch); K. Weinberger et al., "Feature hashing for large scale multitask learning", ICML
2009, arXiv 0902.2206. Each coordinate of the long row goes to one place of the short one, with a
random sign::

    (P x)_k = n_k^(-1/2) Σ_{j in bucket k} s_j x_j,     s_j = ±1, n_k = coordinates in bucket k

A dense P of 500 × 10⁶ numbers takes 2 GB and as many multiplications for each product; this one
takes a few numbers for each coordinate, and one addition.

Departs from the papers: the buckets are of equal size (up to one), those of a random permutation
instead of independent draws, so none is empty; and they are scaled, so that P Pᵀ = I. Then Pᵀ keeps
lengths and angles, Pᵀ P projects onto the span of the rows, and E ‖P x‖² = ‖x‖² · short / long for
long rows whose buckets are all of one size.
"""

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_integers
from pl_fed.random import hashed, key


class SparseProjection(nn.Module):
    """P of short × long numbers, P Pᵀ = I, with one entry other than 0 in each column.

    It is made of ``seed`` and the two lengths alone, and is not saved. It works on stacks of rows
    and under ``torch.vmap``, adds in an order that does not change, and is exact in float64.

    Args:
        long: Length of the rows that are projected.
        short: To how many numbers, from 1 to ``long``. With as many, P changes order and signs.
        seed: Seed of the buckets and the signs.

    Shape:
        - input: [..., long].
        - output: [..., short].

    Raises:
        ValueError: If a length is out of range.

    Example:
        >>> projection = SparseProjection(long=5, short=2, seed=0)
        >>> row = torch.ones(2)
        >>> projection(projection.lifted(row)).allclose(row)
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
        order = hashed(key(seed, "projection", long, short), coordinates).argsort(stable=True)
        place = coordinates % short  # of the coordinates in that order
        signs = (hashed(key(seed, "projection signs", long, short), coordinates) & 1) * 2.0 - 1.0
        buffers = {
            "order": order,
            "bucket": torch.empty_like(order).index_copy_(0, order, place),
            "signs": signs,  # beside the counts: 1 / √n would not be exact in another dtype
            "counts": torch.bincount(place).to(signs.dtype),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return P x for rows x [..., long], [..., short]."""
        mixed = (rows * self.signs).index_select(-1, self.order)
        filled = nn.functional.pad(mixed, (0, -rows.shape[-1] % self.short))
        sums = filled.reshape(*rows.shape[:-1], -1, self.short).sum(-2)
        return sums * self.counts.rsqrt()

    def lifted(self, rows: Tensor) -> Tensor:
        """Return Pᵀ z for rows z [..., short], [..., long]."""
        return (rows * self.counts.rsqrt()).index_select(-1, self.bucket) * self.signs
