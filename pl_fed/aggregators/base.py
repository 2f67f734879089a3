"""What every aggregator keeps to."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch  # noqa: F401
from torch import Tensor, nn

from pl_fed.nets.rows import finite_rows
from pl_fed.recorded import Recorded
from pl_fed.types import RoundContext


class Aggregator(Recorded, nn.Module, ABC):
    """Merge the uploads of a round into one row.

    An aggregator never changes its input and does not depend on the order of the rows, unless its
    docstring says why it does. It computes in float32 at least: bf16 and half uploads give a
    float32 row. Memory from round to round is buffers, so that a checkpoint carries it, and copies:
    the next round's uploads take the place of this one's.

    The federation removes uploads with NaN or Inf before the aggregator sees the rest. If it is
    given such a row nevertheless, the result is finite, as it is where that is only a row that lies
    far off, or it raises: no result ever holds NaN or Inf.

    What it does to uploads is noted for the round's log by ``context.note``.

    Where several processes train the clients, all uploads are brought together in each of them,
    unless the aggregator says how it can do with less: by :attr:`shards` or :meth:`mass`.

    Shape:
        - ``uploads``: [n, d], one row for each client.
        - ``weights``: [n], the number of training samples of each client.
        - output: [d].

    Raises:
        ValueError: If there are too few uploads to merge; there are always too few when n = 0. If
            the result is not finite: an upload is not, or they are too large.

    Example:
        >>> class First(Aggregator):
        ...     def max_byzantine(self, num_uploads):
        ...         return 0
        ...
        ...     def forward(self, uploads, weights, context):
        ...         self.require_uploads(uploads)
        ...         return uploads[0].clone()
        >>> First()(torch.tensor([[1.0, 2.0]]), torch.ones(1), RoundContext())
        tensor([1., 2.])
    """

    shards: bool = False
    """Whether it may be given any slice of the coordinates of all uploads, in any order.

    It gives that slice of the result then, provided that whatever it adds up over the coordinates
    goes through ``context.sum``. It has no memory by coordinate.
    """

    needs_start_losses: bool = False
    """Whether it looks at ``context.start_losses``: another pass over the cohort's data."""

    needs_root: bool = False
    """Whether it looks at ``context.root``: the server trains on data of its own."""

    @property
    def last(self) -> "Aggregator":
        """What merges uploads in the end, behind pre-aggregations if there are any."""
        return self

    def __call__(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Call :meth:`forward`, and refuse a result that is no row, or is not finite."""
        merged: Tensor = super().__call__(uploads, weights, context)
        shape = tuple(uploads.shape[1:])
        if not isinstance(merged, Tensor) or merged.shape != shape:
            got = getattr(merged, "shape", None)
            raise ValueError(
                f"Expected argument `aggregator` to merge uploads {list(uploads.shape)} into a"
                f" tensor {list(shape)} but {type(self).__name__} gave"
                f" {type(merged).__name__ if got is None else f'shape {list(got)}'}."
            )
        if not (math.isfinite(merged.sum()) or merged.isfinite().all()):  # a sum may overflow
            raise self.overflow(uploads)
        return merged

    @abstractmethod
    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] of clients that have ``weights`` [n] samples into one row [d]."""

    @abstractmethod
    def max_byzantine(self, num_uploads: int) -> int:
        """Return how many of ``num_uploads`` rows may be adversarial.

        Up to so many, whatever they hold, the result stays within the range of the honest rows,
        coordinate by coordinate.
        """

    def breakdown(self, num_uploads: int) -> int:
        """Return how many of ``num_uploads`` rows may be adversarial, and the result is bounded.

        Up to so many, whatever they hold, and if ``context.num_byzantine`` says how many they are,
        the result is no longer than n times the longest honest row. It is at least
        :meth:`max_byzantine`, and below n / 2.
        """
        return self.max_byzantine(num_uploads)

    def mass(self, weights: Tensor) -> float | None:
        """Return how much uploads of these weights count, if merging can be done in parts.

        It can where the merge of all uploads is the mean of the merges of any parts of them,
        weighted by the parts' masses, as with means. ``None`` says that it cannot.
        """
        return None

    def require_uploads(self, uploads: Tensor, smallest: int = 1) -> None:
        """Raise ``ValueError`` unless ``uploads`` is a matrix of at least ``smallest`` rows."""
        require_rows(self, uploads, smallest)

    def overflow(self, uploads: Tensor) -> ValueError:
        """Return what to raise where uploads cannot be merged, as numbers are not finite."""
        broken = (~finite_rows(uploads)).nonzero().flatten().tolist()
        merges = "finite ones that it merges into NaN or infinity"
        got = f"NaN or infinity in rows {broken}" if broken else merges
        return ValueError(
            "Expected argument `uploads` to be finite, and small enough to be merged by"
            f" {type(self).__name__}, but got {got}."
        )

    def require_start_losses(self, uploads: Tensor, context: RoundContext) -> Tensor:
        """Return ``context.start_losses``, or raise ``ValueError`` if there is not one for each."""
        losses = context.start_losses
        if losses.shape != uploads.shape[:1] or not losses.isfinite().all():
            raise ValueError(
                "Expected `context.start_losses` to be finite numbers, one for each of the"
                f" {len(uploads)} uploads, for {type(self).__name__} but got {losses.tolist()}."
            )
        return losses


class Prepared(NamedTuple):
    """Uploads as the next in a chain gets them; see :class:`PreAggregator`."""

    uploads: Tensor
    weights: Tensor
    context: RoundContext


class PreAggregator(Recorded, nn.Module, ABC):
    """Change the uploads of a round before an aggregator merges them.

    It keeps to the rules of an :class:`Aggregator`: it never changes its input, does not depend on
    the order of the rows unless its docstring says why, computes in float32 at least, has memory in
    buffers only, and notes what it does by ``context.note``. Uploads that it leaves as they are may
    be the very ones that it was given: what comes next does not change them either.

    Shape:
        - ``uploads``: [n, d].
        - ``weights``: [n], the number of training samples of each client.
        - output: uploads [m, d] with weights [m] and a context of as many clients, m at most n.

    Raises:
        ValueError: If there are too few uploads; there are always too few when n = 0.

    Example:
        >>> class Halved(PreAggregator):
        ...     def forward(self, uploads, weights, context):
        ...         self.require_uploads(uploads)
        ...         return Prepared(uploads / 2, weights, context)
        >>> Halved()(torch.ones(1, 2), torch.ones(1), RoundContext()).uploads
        tensor([[0.5000, 0.5000]])
    """

    shards: bool = False
    """As for an aggregator: whether it may be given any slice of the coordinates."""

    @abstractmethod
    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Prepared:
        """Change uploads [n, d] of clients that have ``weights`` [n] samples."""

    def breakdown(self, num_uploads: int, then: Callable[[int], int]) -> int:
        """Return how many of ``num_uploads`` rows may be adversarial before what comes next.

        Args:
            num_uploads: How many uploads are given.
            then: The breakdown of what comes next, by how many uploads it is given.

        Returns:
            A number for which the result is bounded, as for an aggregator; 0 promises nothing.
        """
        return 0

    def require_uploads(self, uploads: Tensor, smallest: int = 1) -> None:
        """Raise ``ValueError`` unless ``uploads`` is a matrix of at least ``smallest`` rows."""
        require_rows(self, uploads, smallest)


def require_rows(who: Any, uploads: Tensor, smallest: int) -> None:
    """Raise ``ValueError`` unless ``uploads`` is a matrix of at least ``smallest`` rows."""
    if uploads.ndim != 2:
        raise ValueError(
            f"Expected argument `uploads` to be of shape [n, d] for {type(who).__name__} but got"
            f" shape {list(uploads.shape)}."
        )
    if len(uploads) < smallest:
        raise ValueError(
            f"Expected argument `uploads` to have at least {smallest} row{'s' * (smallest > 1)} for"
            f" {type(who).__name__} but got {len(uploads)}: a cohort must be larger, or have fewer"
            " byzantine clients."
        )
