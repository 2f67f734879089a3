"""The contracts of aggregators and pre-aggregators."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch  # noqa: F401
from torch import Tensor

from pl_fed.aggregators.memory import Memory
from pl_fed.configurable import Configurable
from pl_fed.devices import note_devices
from pl_fed.nets.rows import RowLayout, finite_rows
from pl_fed.types import RoundContext


class Aggregator(Configurable, Memory, ABC):
    """Aggregator: merges the uploads of a round into one row. This is the base class.

    Rules for subclasses:

    - It never changes its input.
    - Its result does not depend on the order of the rows, unless its docstring gives a reason.
    - It computes in float32 or wider: bf16 and half uploads give a float32 row.
    - It declares its memory between rounds by :meth:`~Memory.add_memory`, so that a checkpoint
      contains it. Memory holds copies of uploads, because the next round overwrites the uploads.
    - Its result never contains NaN or infinity. The federation removes broken uploads beforehand.
      If an upload with NaN or infinity arrives nevertheless, the aggregator treats it as an outlier
      or raises an error.
    - It reports events for the log of the round with ``context.note``, and the uploads that it
      leaves out with ``context.reject_rows``. A mean with weights of its own reports these with
      ``context.weigh_rows``.

    If several processes train the clients, every process receives all uploads. An aggregator can
    avoid this exchange with :attr:`shards` or :meth:`mass`.

    Shape:
        - ``uploads``: [n, d], one row for each client.
        - ``weights``: [n], the number of training samples of each client.
        - output: [d].

    Raises:
        ValueError: If there are too few uploads to merge, such as n = 0. If the result is not
            finite, because an upload is not finite or the uploads are too large.

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
    """Whether the aggregator can merge any slice of the coordinates on its own, in any order.

    Given a slice of all uploads, it returns this slice of the result. It passes every sum over the
    coordinates through ``context.sum``, and keeps no memory for single coordinates.
    """

    needs_start_losses: bool = False
    """Whether it reads ``context.start_losses``; this costs a pass over the data of the cohort."""

    needs_group_counts: bool = False
    """Whether it reads ``context.group_counts``; this costs a pass over the data of the cohort.

    The data then need groups and classes.
    """

    needs_root: bool = False
    """Whether it reads ``context.root``: the server then trains on its own data in every round."""

    needs_net: bool = False
    """Whether it calls ``context.net``, to look at models, and reads ``context.inputs``."""

    weighs_clients: bool = False
    """Whether it merges a mean with weights of its own, and reports them by ``weigh_rows``."""

    remembers_clients: bool = False
    """Whether it keeps a memory of each client by its id. Each row is then one client's."""

    sets_model: bool = False
    """Whether it chooses the next global model, and returns the update that leads there.

    The server's optimizer has to add this update: plain SGD with learning rate 1.
    """

    @property
    def final_aggregator(self) -> "Aggregator":
        """The aggregator behind all pre-aggregators: this object, unless it is a chain."""
        return self

    def __call__(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Call :meth:`forward`, and check that it returns one finite row on the uploads' device."""
        try:
            merged: Tensor = super().__call__(uploads, weights, context)
        except RuntimeError as error:
            note_devices(error)
            raise
        shape = tuple(uploads.shape[1:])
        if not isinstance(merged, Tensor) or merged.shape != shape:
            got = getattr(merged, "shape", None)
            raise ValueError(
                f"Expected argument `aggregator` to merge uploads {list(uploads.shape)} into a"
                f" tensor {list(shape)} but {type(self).__name__} returned"
                f" {type(merged).__name__ if got is None else f'shape {list(got)}'}."
            )
        if merged.device != uploads.device:
            raise ValueError(
                f"Expected argument `aggregator` to merge uploads on {uploads.device} into a tensor"
                f" there but {type(self).__name__} returned one on {merged.device}: return"
                " `merged.to(uploads.device)`."
            )
        if not (math.isfinite(merged.sum()) or merged.isfinite().all()):  # a sum may overflow
            raise self.overflow_error(uploads)
        return merged

    @abstractmethod
    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] of clients with ``weights`` [n] samples into one row [d]."""

    @abstractmethod
    def max_byzantine(self, num_uploads: int) -> int:
        """Return the number of Byzantine rows up to which the result stays in the benign range.

        Up to this number, every coordinate of the result lies in the range of the benign rows, for
        any values in the Byzantine rows.

        Args:
            num_uploads: Number of rows, Byzantine ones included.
        """

    def breakdown(self, num_uploads: int) -> int:
        """Return the number of Byzantine rows up to which the result stays bounded.

        Up to this number, the result is at most n times as long as the longest benign row, for any
        values in the Byzantine rows. This holds if ``context.num_byzantine`` is the number of
        Byzantine rows. The returned number is at least :meth:`max_byzantine`, and below n / 2.

        Args:
            num_uploads: Number of rows n, Byzantine ones included.
        """
        return self.max_byzantine(num_uploads)

    def mass(self, weights: Tensor) -> float | None:
        """Return the total weight of these uploads, or ``None`` if parts cannot merge separately.

        Parts can merge separately if the result for all uploads is the weighted mean of the results
        for the parts. The weights are the masses of the parts. This holds for means.
        """
        return None

    def sent_numbers(self, numbers: int) -> int:
        """Return how many numbers a client sends of an upload; all of them by default.

        Args:
            numbers: The numbers of an upload before this aggregator.
        """
        return numbers

    def list_compared_positions(self, layout: RowLayout) -> Tensor | None:
        """Return the positions of an upload that it compares between clients, int64.

        ``None``, the default, stands for all positions.

        Args:
            layout: The layout of an upload.
        """
        return None

    def take_needs(self, aggregator: "Aggregator") -> None:
        """Declare the needs of an aggregator that this one calls, beside its own.

        An aggregator that remembers clients or sets the model does so within another one, too.
        """
        self.needs_start_losses |= aggregator.needs_start_losses
        self.needs_group_counts |= aggregator.needs_group_counts
        self.needs_root |= aggregator.needs_root
        self.needs_net |= aggregator.needs_net
        self.weighs_clients |= aggregator.weighs_clients
        self.remembers_clients |= aggregator.remembers_clients
        self.sets_model |= aggregator.sets_model

    def require_uploads(self, uploads: Tensor, smallest: int = 1) -> None:
        """Raise ``ValueError`` unless ``uploads`` is a matrix of at least ``smallest`` rows."""
        require_rows(self, uploads, smallest)

    def require_layout(self, uploads: Tensor, context: RoundContext) -> RowLayout:
        """Return ``context.layout``, or raise ``ValueError`` unless it fits the uploads [n, d]."""
        layout = context.layout
        if layout is None or layout.numel != uploads.shape[1]:
            got = "none" if layout is None else f"one of {layout.numel} numbers"
            raise ValueError(
                f"Expected `context.layout` to place the {uploads.shape[1]} numbers of an upload"
                f" for {type(self).__name__}, which looks at each parameter tensor, but got {got}."
            )
        return layout

    def require_broadcast(self, uploads: Tensor, context: RoundContext) -> Tensor:
        """Return ``context.broadcast``, or raise ``ValueError`` unless it is as long as a row."""
        if context.broadcast.shape != uploads.shape[1:]:
            raise ValueError(
                "Expected `context.broadcast` to be the global model, as long as an upload of"
                f" {uploads.shape[1]} numbers, for {type(self).__name__} but got shape"
                f" {list(context.broadcast.shape)}."
            )
        return context.broadcast

    def require_clients(self, uploads: Tensor, context: RoundContext) -> Tensor:
        """Return ``context.clients``, or raise ``ValueError`` unless each upload has its own id."""
        clients = context.clients
        if clients.shape != uploads.shape[:1] or len(clients.unique()) < len(clients):
            raise ValueError(
                f"Expected `context.clients` to be {len(uploads)} different ids, one for each"
                f" upload, for {type(self).__name__} but got {clients.tolist()}."
            )
        return clients

    def overflow_error(self, uploads: Tensor) -> ValueError:
        """Return the exception for uploads without a finite merged row."""
        broken = (~finite_rows(uploads)).nonzero().flatten().tolist()
        overflow = "finite values that overflow to NaN or infinity"
        got = f"NaN or infinity in rows {broken}" if broken else overflow
        return ValueError(
            "Expected argument `uploads` to be finite, and small enough to be merged by"
            f" {type(self).__name__}, but got {got}."
        )

    def require_start_losses(self, uploads: Tensor, context: RoundContext) -> Tensor:
        """Return ``context.start_losses``, or raise ``ValueError`` if an upload lacks its loss."""
        losses = context.start_losses
        if losses.shape != uploads.shape[:1] or not losses.isfinite().all():
            raise ValueError(
                "Expected `context.start_losses` to be finite numbers, one for each of the"
                f" {len(uploads)} uploads, for {type(self).__name__} but got {losses.tolist()}."
            )
        return losses

    def require_group_counts(self, uploads: Tensor, context: RoundContext) -> Tensor:
        """Return ``context.group_counts``, or raise ``ValueError`` if an upload lacks counts."""
        counts = context.group_counts
        if counts.ndim != 4 or counts.shape[:2] != (len(uploads), 3):
            raise ValueError(
                f"Expected `context.group_counts` to be of shape [{len(uploads)}, 3, groups,"
                f" classes], one table for each upload, for {type(self).__name__} but got shape"
                f" {list(counts.shape)}."
            )
        return counts

    def require_nonnegative_losses(self, uploads: Tensor, context: RoundContext) -> Tensor:
        """Return ``context.start_losses``, or raise ``ValueError`` unless all are at least 0."""
        losses = self.require_start_losses(uploads, context)
        if losses.amin() < 0:
            raise ValueError(
                f"Expected `context.start_losses` to be at least 0 for {type(self).__name__}, which"
                f" computes powers of them, but got {losses.tolist()}."
            )
        return losses


class PreparedUploads(NamedTuple):
    """The output of a :class:`PreAggregator`: uploads for the next stage of a chain.

    Attributes:
        uploads: The rows, shape [m, d].
        weights: The number of training samples of each row, shape [m].
        context: The context of the m rows.

    Example:
        >>> prepared = PreparedUploads(torch.eye(2), torch.ones(2), RoundContext())
        >>> prepared.uploads.shape
        torch.Size([2, 2])
    """

    uploads: Tensor
    weights: Tensor
    context: RoundContext


class PreAggregator(Configurable, Memory, ABC):
    """Pre-aggregator: changes the uploads before an aggregator merges them. This is the base class.

    Rules for subclasses:

    - It never changes its input. It may return uploads that it does not change without a copy,
      because the next stage does not change its input either.
    - Its result does not depend on the order of the rows, unless its docstring gives a reason.
    - It computes in float32 or wider.
    - It declares its memory between rounds by :meth:`~Memory.add_memory`.
    - It reports events for the log of the round with ``context.note``, and the uploads that it
      leaves out with ``context.reject_rows``.
    - If its rows are no longer single clients' uploads, it returns ``context.mix_clients()``.

    Shape:
        - ``uploads``: [n, d].
        - ``weights``: [n], the number of training samples of each client.
        - output: uploads [m, d] with weights [m] and a context of m clients, m at most n.

    Raises:
        ValueError: If there are too few uploads, such as n = 0.

    Example:
        >>> class Halved(PreAggregator):
        ...     def forward(self, uploads, weights, context):
        ...         self.require_uploads(uploads)
        ...         return PreparedUploads(uploads / 2, weights, context)
        >>> Halved()(torch.ones(1, 2), torch.ones(1), RoundContext()).uploads
        tensor([[0.5000, 0.5000]])
    """

    shards: bool = False
    """Whether it can change any slice of the coordinates on its own, as ``Aggregator.shards``."""

    merges_clients: bool = False
    """Whether a row that it returns stands for several clients, other ones in each round."""

    @abstractmethod
    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> PreparedUploads:
        """Change uploads [n, d] of clients with ``weights`` [n] samples."""

    def breakdown(self, num_uploads: int, next_breakdown: Callable[[int], int]) -> int:
        """Return the number of Byzantine rows up to which the merged row stays bounded.

        Args:
            num_uploads: Number of uploads that enter this stage, Byzantine ones included.
            next_breakdown: The breakdown of the next stage as a function of its number of uploads.

        Returns:
            The number, as in ``Aggregator.breakdown``; 0 promises nothing.
        """
        return 0

    def sent_numbers(self, numbers: int) -> int:
        """Return how many numbers a client sends of an upload; fewer if it compresses.

        Args:
            numbers: The numbers of an upload before this pre-aggregator.
        """
        return numbers

    def require_uploads(self, uploads: Tensor, smallest: int = 1) -> None:
        """Raise ``ValueError`` unless ``uploads`` is a matrix of at least ``smallest`` rows."""
        require_rows(self, uploads, smallest)


def require_rows(owner: object, uploads: Tensor, smallest: int) -> None:
    """Raise ``ValueError`` unless ``uploads`` is a matrix of at least ``smallest`` rows.

    Args:
        owner: The aggregator or pre-aggregator; the message names its class.
        uploads: The uploads.
        smallest: The smallest number of rows.
    """
    if uploads.ndim != 2:
        raise ValueError(
            f"Expected argument `uploads` to be of shape [n, d] for {type(owner).__name__} but got"
            f" shape {list(uploads.shape)}."
        )
    if len(uploads) < smallest:
        raise ValueError(
            f"Expected argument `uploads` to have at least {smallest} row{'s' * (smallest > 1)} for"
            f" {type(owner).__name__} but got {len(uploads)}: use a larger cohort, or fewer"
            " Byzantine clients."
        )
