"""PowerSGD: low-rank approximations of an upload's matrices.

T. Vogels, S. P. Karimireddy and M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", NeurIPS 2019, arXiv 1905.13727, Algorithm 1. For each parameter M, read
as a matrix [n, m] of its first dimension and all others, and Q [m, r] of the client's last round::

    P ← M Q,   P̂ ← orthogonalize(P),   Q ← Mᵀ P̂,   C(M) = P̂ Qᵀ = P̂ P̂ᵀ M

C is a projection: ‖C(M) − M‖² = ‖M‖² − ‖P̂ᵀ M‖². A message has Σ r (n + m) numbers for the matrices.
Parameters of one dimension, and matrices with r (n + m) ≥ n m, are sent in full.
The first Q, and each column of Q that is 0, is normal, drawn for the client and the round.

Departs from the paper:

- Each client has its own P̂ and Q, and the aggregator merges their products. The paper averages P
  over the workers before it is orthogonalized: a second exchange within the round, and no upload
  to aggregate.
- A forged upload has a new Q.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pl_fed.arguments import check_integers
from pl_fed.compressors.base import ERROR, Compressor, Sending
from pl_fed.nets.rows import RowLayout
from pl_fed.random import normals

_FACTORS = "factors"


class PowerSGD(Compressor):
    """PowerSGD: sends matrices of an upload as products of two thin ones, with error feedback.

    Source: Vogels et al., NeurIPS 2019. It is biased, and a contraction. A client keeps a row as
    long as the upload, and the factors Q.

    Args:
        rank: r, the rank of the products.

    Raises:
        ValueError: If ``rank`` is below 1.

    Example:
        >>> layout = RowLayout.from_tensors({"weight": torch.zeros(100, 50)}.items())
        >>> PowerSGD(rank=2).count_bits(layout, 32) == 32 * 2 * (100 + 50)
        True
    """

    error_feedback = True

    def __init__(self, rank: int = 2) -> None:
        check_integers(1, rank=rank)
        self.rank = rank

    def memory_lengths(self, layout: RowLayout) -> dict[str, int]:
        """Return the lengths of the memory of error feedback, and of the factors Q."""
        widths = [width for _, _, width in self._matrices(layout)]
        return {ERROR: layout.numel, _FACTORS: self.rank * sum(widths)}

    def compress(self, rows: Tensor, sending: Sending) -> Tensor:
        """Return the rows with matrices of rank r, and put the new factors into the memory."""
        received, factors, n = rows.clone(), sending.memory[_FACTORS].to(rows), len(rows)
        new_factors, begin = [], 0
        for offset, height, width in self._matrices(sending.layout):
            end, last = begin + width * self.rank, offset + height * width
            q = self._complete(factors[:, begin:end].view(n, width, self.rank), begin, sending)
            matrix = rows[:, offset:last].view(n, height, width)
            p = torch.linalg.qr(matrix @ q).Q
            q = matrix.mT @ p
            received[:, offset:last] = (p @ q.mT).reshape(n, -1)
            new_factors.append(q.reshape(n, -1))
            begin = end
        sending.memory[_FACTORS] = torch.cat([rows[:, :0], *new_factors], 1)
        return received

    def _complete(self, factors: Tensor, begin: int, sending: Sending) -> Tensor:
        """Return the factors [clients, m, r] with drawn numbers in the columns of zeros.

        Args:
            factors: The factors of a matrix.
            begin: The first position of the matrix's factors in the memory; it keys the draws.
            sending: The keys of the clients.
        """
        numel = factors[0].numel()
        counters = torch.arange(begin, begin + numel, device=factors.device)
        draws = normals(sending.keys, counters).view_as(factors).to(factors.dtype)
        is_zero = (factors == 0).all(dim=1, keepdim=True)
        return draws.where(is_zero, factors)

    def _matrices(self, layout: RowLayout) -> Iterator[tuple[int, int, int]]:
        """Yield the offset, the height and the width of each matrix that a product shortens."""
        for shape, offset in zip(layout.shapes, layout.offsets):
            if len(shape) > 1 and shape.numel():
                height, width = shape[0], shape.numel() // shape[0]
                if self.rank * (height + width) < height * width:
                    yield offset, height, width

    def count_bits(self, layout: RowLayout, number_bits: int) -> int:
        """Return b Σ r (n + m), and b for each other number."""
        numbers = layout.numel
        for _, height, width in self._matrices(layout):
            numbers += self.rank * (height + width) - height * width
        return numbers * number_bits
