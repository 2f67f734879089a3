"""The contract of compressors, with error feedback.

Error feedback adds the unsent parts of a client's earlier uploads to its next one. For an upload
u_t, a memory e_t with e_0 = 0, and a codec C::

    p_t = u_t + e_t        the client sends C(p_t)
    e_{t+1} = p_t − C(p_t)

The sum telescopes: Σ_{s ≤ t} C(p_s) + e_{t+1} = Σ_{s ≤ t} u_s. Nothing is lost, only delayed.

S. U. Stich, J.-B. Cordonnier and M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv
1809.07599, Algorithm 1; S. P. Karimireddy, Q. Rebjock, S. U. Stich and M. Jaggi, "Error Feedback
Fixes SignSGD and other Gradient Compression Schemes", ICML 2019, arXiv 1901.09847, Algorithm 2.
Departs from the papers: u_t is the upload of a whole round, not a gradient times a learning rate.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from pl_fed.arguments import check_at_most, check_integers
from pl_fed.configurable import Configurable
from pl_fed.nets.rows import RowLayout

ERROR = "error"
"""The name of the memory of error feedback."""


@dataclass(frozen=True)
class Sending:
    """Sending: the inputs of a codec beside the uploads.

    Attributes:
        layout: The layout of an upload: names and shapes of its parameters.
        keys: The key of each client's draws in the round, int64 [clients, 1]. Draws are
            ``pl_fed.random.uniforms(keys, counters)``.
        memory: The rows that clients keep for the codec, [clients, length] each. ``compress`` puts
            new rows into this dictionary, and changes no tensor in place.
    """

    layout: RowLayout
    keys: Tensor
    memory: dict[str, Tensor]


class Compressor(Configurable, ABC):
    """Compressor: turns uploads into the rows that the server receives. This is the base class.

    Compression is simulated: the rows keep their length, and :meth:`count_bits` tells the length of
    the message. Rules for subclasses:

    - A row of the result depends on the client's own row, key and memory only.
    - It never changes its input, and computes in the dtype of the rows, float32 or float64.
    - It knows no scale: C(a x) = a C(x) for a = 2, 4, ...
    - Either ``error_feedback`` is true and C is a contraction,
      E‖C(x) − x‖² ≤ (1 − δ) ‖x‖² with 0 < δ ≤ 1; or the docstring tells the bias and the variance.

    Attributes:
        error_feedback: Whether a client adds the unsent parts of earlier uploads.
        is_unbiased: Whether E[C(x)] = x.

    Example:
        >>> class HalfPrecision(Compressor):
        ...     def compress(self, rows, sending):
        ...         return rows.bfloat16().to(rows.dtype)
        ...
        ...     def count_bits(self, layout, number_bits):
        ...         return 16 * layout.numel
        >>> layout = RowLayout.from_tensors({"weight": torch.zeros(2)}.items())
        >>> keys = torch.zeros(1, 1, dtype=torch.int64)
        >>> HalfPrecision().send(torch.tensor([[0.1, 2.0]]), layout, keys, {})
        (tensor([[0.1001, 2.0000]]), {})
    """

    error_feedback: bool = False
    is_unbiased: bool = False

    @abstractmethod
    def compress(self, rows: Tensor, sending: Sending) -> Tensor:
        """Return the rows that the server restores from the messages, [clients, numel].

        Args:
            rows: Uploads of finite numbers, with the memory of error feedback, [clients, numel].
            sending: Layout, keys and memory.
        """

    @abstractmethod
    def count_bits(self, layout: RowLayout, number_bits: int) -> int:
        """Return the length of a message in bits.

        Args:
            layout: The layout of an upload.
            number_bits: The bits of an uncompressed number, such as 32.
        """

    def check(self, layout: RowLayout) -> None:
        """Refuse a layout that does not fit the arguments.

        Raises:
            ValueError: If an argument is too large for the layout.
        """

    def memory_lengths(self, layout: RowLayout) -> dict[str, int]:
        """Return the length of each row that a client keeps; they are 0 before its first upload."""
        return {ERROR: layout.numel} if self.error_feedback else {}

    def send(
        self, uploads: Tensor, layout: RowLayout, keys: Tensor, memory: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the uploads as the server receives them, and the clients' new memory.

        An upload with NaN or infinity arrives as NaN, so that the server leaves it out, and the
        client's memory stays as before the round. An overflow of the memory does the same.

        Args:
            uploads: The uploads, [clients, numel].
            layout: The layout of an upload.
            keys: The key of each client's draws, int64 [clients, 1].
            memory: The clients' rows by name, [clients, length] each.

        Returns:
            Rows [clients, numel] in the dtype of the uploads; and rows [clients, length] by name.
        """
        dtype = torch.promote_types(uploads.dtype, torch.float32)
        is_finite = uploads.isfinite().all(dim=1, keepdim=True)
        rows = uploads.to(dtype).where(is_finite, 0.0)
        if self.error_feedback:
            rows = rows + memory[ERROR].to(dtype)
        sending = Sending(layout, keys, dict(memory))
        received = self.compress(rows, sending).to(uploads.dtype)
        if self.error_feedback:
            sending.memory[ERROR] = rows - received
        for new_rows in sending.memory.values():
            is_finite = is_finite & new_rows.isfinite().all(dim=1, keepdim=True)
        return received.where(is_finite, math.nan), sending.memory


def check_count(k: int | float) -> None:
    """Raise an error unless ``k`` is a number of coordinates (int) or a share in (0, 1] (float)."""
    if isinstance(k, float):
        if not 0 < k <= 1:
            raise ValueError(
                "Expected argument `k` to be a number of parameters (an integer from 1 on) or a"
                f" share of them in (0, 1] but got {k}: set, for example, 0.01."
            )
    else:
        check_integers(1, k=k)


def count_sent(k: int | float, numel: int) -> int:
    """Return the number of coordinates for a number or a share of them; at least 1.

    Example:
        >>> count_sent(3, 50), count_sent(0.1, 50), count_sent(0.001, 50)
        (3, 5, 1)
    """
    return k if isinstance(k, int) else max(1, math.floor(k * numel + 1e-9))


def check_count_fits(k: int | float, layout: RowLayout) -> None:
    """Raise ``ValueError`` if ``k`` is above the number of coordinates."""
    if isinstance(k, int):
        check_at_most(layout.numel, k=k)
