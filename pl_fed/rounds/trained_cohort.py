"""The results of a round's local work: of this process's clients, and of the whole cohort."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property

import torch
from torch import Tensor

from pl_fed.devices import move_positions, to_device
from pl_fed.distributed.table_layout import TableLayout, TableName
from pl_fed.distributed.work_share import WorkShare
from pl_fed.state import ClientStore
from pl_fed.trees import select

GLOBAL_STATISTICS = "global.statistics"
"""The name under which clients propose running statistics of the global model."""


class UploadStatus(IntEnum):
    """Upload status: whether the server can use a client's results of a round."""

    VALID = 0
    NOT_FINITE = 1
    MALFORMED = 2
    FAILED = 3


@dataclass
class ChunkResults:
    """Chunk results: the results of local training for a chunk of clients. All rows are usable.

    Attributes:
        positions: The clients' positions in this process's part of the cohort, int64 [clients].
        clients: The clients' ids, int64 [clients].
        tables: A number of each client by kind and name, [clients] each: see
            :class:`CohortResults`.
        uploads: The uploads, [clients, numel]; ``None`` if the clients send nothing.
        proposals: Proposals of new server states by name, [clients, length] each.
        states: The clients' new states by name, [clients, length] each.
    """

    positions: Tensor
    clients: Tensor
    tables: dict[TableName, Tensor]
    uploads: Tensor | None
    proposals: dict[str, Tensor]
    states: dict[str, Tensor]

    @classmethod
    def build_failed(cls, position: int, like: Tensor) -> "ChunkResults":
        """Return the results of a client that raised an exception: it has none.

        Args:
            position: Its position in this process's part of the cohort.
            like: A tensor with the models' dtype and device.
        """
        return cls(
            positions=torch.tensor([position]),
            clients=torch.empty(0, dtype=torch.int64),
            tables={
                ("metrics", "loss"): like.new_full((1,), math.nan),
                ("status", ""): like.new_full((1,), UploadStatus.FAILED, dtype=torch.int8),
            },
            uploads=None,
            proposals={},
            states={},
        )

    def select(self, places: Tensor) -> "ChunkResults":
        """Return the results of some clients, by their places in the chunk, int64 [n]."""
        return ChunkResults(
            **{entry.name: select(getattr(self, entry.name), places) for entry in fields(self)}
        )


class CohortResults:
    """Cohort results: the results of this process's clients in a round, collected from chunks.

    Small tables have a number of each client. Their kinds are:

    - ``metrics``: means over the local steps of the values that ``training_step`` returned, by name
    - ``status``: the :class:`UploadStatus`, int8
    - ``has_upload``, and ``proposals`` by server state: whether the client sends them, bool
    - ``idle``: whether the client took no step, bool
    - ``group``: the client's center, int64
    - ``start_losses``: the mean loss of w^t over all training data of the client

    A chunk, a process or a round may lack a table: it is zero for all of its clients.

    Args:
        num_clients: The number of this process's clients in the cohort.
        buffer: The upload buffer of the previous round, or ``None``. It is reused, because the
            system provides new memory of this size page by page.

    Attributes:
        buffer: The upload buffer of this round; ``None`` if one chunk contains all uploads.
        tables: The small tables by kind and name, [clients] each.
        uploads: The uploads, [clients, numel]; ``None`` if no client sends one.
        proposals: Proposals of new server states by name, [clients, length] each.
        group_counts: Counts of the clients' samples by group and class under w^t, int64 [clients,
            3, groups, classes]; ``None`` in all processes or in none.
        states: The clients' ids and new states, for each chunk.
        errors: The exceptions of clients that failed, by id.
        num_done: The number of clients with results.
        lone_model: The global model of the cohort's only client after its local steps, [numel];
            ``None`` for a larger cohort, and in several processes.
    """

    def __init__(self, num_clients: int, buffer: Tensor | None) -> None:
        self.num_clients = num_clients
        self.buffer = buffer
        self.lone_model: Tensor | None = None
        self.tables: dict[TableName, Tensor] = {}
        self.uploads: Tensor | None = None
        self.proposals: dict[str, Tensor] = {}
        self.group_counts: Tensor | None = None
        self.states: list[tuple[Tensor, dict[str, Tensor]]] = []
        self.errors: dict[int, Exception] = {}
        self.num_done = 0

    def add(self, chunk: ChunkResults) -> None:
        """Add the results of a chunk."""
        self.num_done += len(chunk.positions)
        positions, tables = _as_slice(chunk.positions), dict(chunk.tables)
        if chunk.uploads is not None:
            collected = self._reuse_buffer(chunk.uploads) if self.uploads is None else self.uploads
            self.uploads = self._insert(collected, positions, chunk.uploads)
            self.buffer = None if self.uploads is chunk.uploads else self.uploads
            for name, rows in chunk.proposals.items():
                self.proposals[name] = self._insert(self.proposals.get(name), positions, rows)
            sent = torch.ones(len(chunk.positions), dtype=torch.bool)
            tables["has_upload", ""] = sent
            tables |= {("proposals", name): sent for name in chunk.proposals}
        for key, values in tables.items():
            table = self.tables.get(key)
            if table is None and len(values) < self.num_clients:
                table = values.new_zeros(self.num_clients)
            self.tables[key] = self._insert(table, positions, values)
        if len(chunk.clients):
            self.states.append((chunk.clients, chunk.states))

    def complete_proposals(self, current: Mapping[str, Tensor]) -> None:
        """Add the server's current state as the proposal of clients without a proposal.

        A state without any proposal stays out.

        Args:
            current: The server's current states by name, [length] each.
        """
        for name, rows in self.proposals.items():
            missing = ~self.tables["proposals", name]
            if missing.any():
                rows[missing.to(rows.device)] = current[name]

    def _insert(self, rows: Tensor | None, positions: slice | Tensor, values: Tensor) -> Tensor:
        """Write the values of a chunk into the rows of all clients, and return these rows."""
        if rows is None:
            if isinstance(positions, slice) and len(values) == self.num_clients:
                return values
            rows = values.new_empty(self.num_clients, *values.shape[1:])
        rows[move_positions(positions, like=rows)] = values
        return rows

    def _reuse_buffer(self, uploads: Tensor) -> Tensor | None:
        """Return the upload buffer of the previous round if it is needed and fits, or ``None``."""
        buffer, shape = self.buffer, (self.num_clients, *uploads.shape[1:])
        if buffer is None or len(uploads) == self.num_clients or buffer.shape != shape:
            return None
        fits = buffer.dtype == uploads.dtype and buffer.device == uploads.device
        return buffer if fits else None


def _as_slice(positions: Tensor) -> slice | Tensor:
    """Return consecutive positions as a slice, and other positions unchanged."""
    numbers = positions.tolist()
    consecutive = range(numbers[0], numbers[0] + len(numbers))
    return slice(consecutive.start, consecutive.stop) if numbers == [*consecutive] else positions


@dataclass(frozen=True)
class TrainedCohort:
    """Trained cohort: the results of local training for the whole cohort.

    Attributes:
        share: The distribution of the clients over the processes.
        broadcast: The global model w^t at the start of the round, [numel].
        metrics: Means over the local steps of the values that ``training_step`` returned,
            [cohort] each.
        status: The :class:`UploadStatus` of each client, int8 [cohort].
        has_uploads: Whether any client sends an upload.
        start_losses: The mean loss of w^t over all training data of each client, [cohort]; or
            empty.
        group_counts: Counts of the clients' samples by group and class under w^t, int64 [cohort, 3,
            groups, classes]; or empty.
        idle: A mask of the clients that took no step, bool [cohort]; ``None`` if there are none.
        group: The center of each client, int64 [cohort], on the CPU; ``None`` without centers.
        proposed: Names of the server states with a proposal of any client.
        own: The results of this process's clients, with their uploads.
    """

    share: WorkShare
    broadcast: Tensor
    metrics: dict[str, Tensor]
    status: Tensor
    has_uploads: bool
    start_losses: Tensor
    group_counts: Tensor
    idle: Tensor | None
    group: Tensor | None
    proposed: list[str]
    own: CohortResults

    @classmethod
    def join(
        cls,
        share: WorkShare,
        own: CohortResults,
        broadcast: Tensor,
        trained: tuple[str, ...],
        layout: TableLayout,
    ) -> "TrainedCohort":
        """Join the results of all processes; every process gets the same results.

        A client without an upload is broken if other clients send one or if the global model is
        trained. A client is broken, too, if its loss of w^t is measured and not finite, because the
        aggregator reads the losses of all uploads.

        Args:
            share: The distribution of the clients over the processes.
            own: The results of this process's clients.
            broadcast: The global model w^t at the start of the round, [numel].
            trained: Names of the trained models.
            layout: The names of the results' tables, on which the processes agree.
        """
        device = broadcast.device
        joined = share.join_tables(own.tables, layout, device) if len(share.cohort) else {}
        no_counts = torch.empty(0, dtype=torch.int64, device=device)
        metrics = {name: values for (kind, name), values in joined.items() if kind == "metrics"}
        metrics = metrics or {"loss": broadcast.new_empty(0)}
        no_clients = torch.empty(0, dtype=torch.int8, device=device)
        status, idle = joined.get(("status", ""), no_clients), joined.get(("idle", ""))
        has_upload = joined.get(("has_upload", ""), torch.zeros(len(status), dtype=torch.bool))
        num_uploads = int(has_upload.count_nonzero())
        if num_uploads < len(has_upload) and (num_uploads or "global" in trained):
            is_known = to_device(has_upload, status) | (status == UploadStatus.FAILED)
            status = torch.where(is_known, status, UploadStatus.MALFORMED)
        start_losses = joined.get(("start_losses", ""), metrics["loss"][:0])
        if len(start_losses):
            lacks_loss = to_device(~start_losses.isfinite(), status)
            is_unread = lacks_loss & (status == UploadStatus.VALID)
            status = torch.where(is_unread, UploadStatus.NOT_FINITE, status)
        return cls(
            share=share,
            broadcast=broadcast,
            metrics=metrics,
            status=status,
            has_uploads=num_uploads > 0,
            start_losses=start_losses,
            group_counts=no_counts if own.group_counts is None else share.gather(own.group_counts),
            idle=None if idle is None else to_device(idle, status),
            group=None if (group := joined.get(("group", ""))) is None else group.cpu(),
            proposed=[name for kind, name in joined if kind == "proposals"],
            own=own,
        )

    @property
    def clients(self) -> Tensor:
        """The ids of the cohort, int64 [cohort]."""
        return self.share.cohort

    @property
    def losses(self) -> Tensor:
        """Mean training loss of each client over its local steps, [cohort]; NaN without steps."""
        losses = self.metrics["loss"]
        return losses if self.idle is None else losses.masked_fill(self.idle, math.nan)

    @cached_property
    def valid(self) -> Tensor:
        """A mask of the clients with usable results, bool [cohort]."""
        return self.status == UploadStatus.VALID

    @cached_property
    def num_broken(self) -> int:
        """The number of broken clients: their results are unusable."""
        return len(self.valid) - int(self.valid.count_nonzero())

    def store_states(self, store: ClientStore) -> Tensor:
        """Store the new states of the valid clients, and return the ids of these, int64 [n].

        Args:
            store: This process's store.
        """
        share, states = self.share, self.own.states
        if self.num_broken:
            valid = self.valid.cpu()
            share, states = share.select(valid), []
            for ids, rows in self.own.states:
                is_valid = torch.isin(ids, share.cohort)
                states.append((ids[is_valid], {name: row[is_valid] for name, row in rows.items()}))
        share.store_states(store, states)
        return share.cohort
