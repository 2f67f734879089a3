"""The results of a round's local work: of this process's clients, and of the whole cohort."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch
from torch import Tensor

from pl_fed.distributed.work_share import WorkShare

GLOBAL_STATISTICS = "global.statistics"
"""The name under which clients propose running statistics of the global model."""


class UploadStatus(IntEnum):
    """Whether the server can use what a client computed in a round."""

    VALID = 0
    NOT_FINITE = 1
    MALFORMED = 2


@dataclass
class ChunkResults:
    """What a chunk of clients computed in its local work. All rows are usable.

    Attributes:
        positions: The clients' positions in this process's part of the cohort, int64 [clients].
        clients: Their ids, int64 [clients].
        metrics: Means over the local steps of what ``training_step`` returned, [clients] each.
        status: An :class:`UploadStatus` for each, int8 [clients].
        uploads: [clients, numel]; ``None`` if they send nothing.
        proposals: What they propose that server states become, by name [clients, length].
        states: What they keep, by name [clients, length].
    """

    positions: Tensor
    clients: Tensor
    metrics: dict[str, Tensor]
    status: Tensor
    uploads: Tensor | None
    proposals: dict[str, Tensor]
    states: dict[str, Tensor]


class CohortResults:
    """The results of this process's clients of a cohort, collected from chunks.

    Args:
        num_clients: The number of clients.
        buffer: Memory in which uploads were collected in the round before. It is used again, as
            the system would give new memory of that size page by page.

    Attributes:
        buffer: Memory in which the uploads are collected; ``None`` if one chunk gave them all.
        metrics: See :class:`ChunkResults`, as for the rest; of all clients.
        status: int8 [clients]; ``None`` if there are no clients.
        sends: Which clients send an upload, bool [clients].
        uploads: [clients, numel]; ``None`` if no client sends anything.
        proposals: By name, [clients, length].
        start_losses: The loss of w^t over all training data of each, [clients]; or ``None``.
        states: For each chunk its clients' ids and states.
    """

    def __init__(self, num_clients: int, buffer: Tensor | None) -> None:
        self.num_clients = num_clients
        self.buffer = buffer
        self.metrics: dict[str, Tensor] = {}
        self.status: Tensor | None = None
        self.sends = torch.zeros(num_clients, dtype=torch.bool)
        self.uploads: Tensor | None = None
        self.proposals: dict[str, Tensor] = {}
        self.start_losses: Tensor | None = None
        self.states: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._proposers: dict[str, list[Tensor]] = {}

    def add(self, chunk: ChunkResults) -> None:
        """Add the results of a chunk."""
        places = _as_range(chunk.positions)
        for name, values in chunk.metrics.items():
            self.metrics[name] = self._insert(self.metrics.get(name), places, values)
        self.status = self._insert(self.status, places, chunk.status)
        self.states.append((chunk.clients, chunk.states))
        if chunk.uploads is None:
            return
        self.sends[places] = True
        collected = self._reuse_buffer(chunk.uploads) if self.uploads is None else self.uploads
        self.uploads = self._insert(collected, places, chunk.uploads)
        self.buffer = None if self.uploads is chunk.uploads else self.uploads
        for name, rows in chunk.proposals.items():
            self.proposals[name] = self._insert(self.proposals.get(name), places, rows)
            self._proposers.setdefault(name, []).append(chunk.positions)

    def complete_proposals(self, current: Mapping[str, Tensor]) -> None:
        """Let clients that propose nothing, where others do, propose the server's current state.

        Args:
            current: The server's states by name, [length] each.
        """
        for name, proposers in self._proposers.items():
            if sum(map(len, proposers)) < self.num_clients:
                silent = torch.ones(self.num_clients, dtype=torch.bool)
                silent[torch.cat(proposers)] = False
                self.proposals[name][silent.to(current[name].device)] = current[name]

    def _insert(self, rows: Tensor | None, places: slice | Tensor, values: Tensor) -> Tensor:
        """Return the rows of all clients with those of some written into their places."""
        if rows is None:
            if isinstance(places, slice) and len(values) == self.num_clients:
                return values
            rows = values.new_empty(self.num_clients, *values.shape[1:])
        rows[places if isinstance(places, slice) else places.to(rows.device)] = values
        return rows

    def _reuse_buffer(self, uploads: Tensor) -> Tensor | None:
        """Return the buffer of the round before, if it is needed and fits."""
        buffer, shape = self.buffer, (self.num_clients, *uploads.shape[1:])
        if buffer is None or len(uploads) == self.num_clients or buffer.shape != shape:
            return None
        fits = buffer.dtype == uploads.dtype and buffer.device == uploads.device
        return buffer if fits else None


def _as_range(positions: Tensor) -> slice | Tensor:
    """Return positions as a slice if they are consecutive, or else as they are."""
    numbers = positions.tolist()
    consecutive = range(numbers[0], numbers[0] + len(numbers))
    return slice(consecutive.start, consecutive.stop) if numbers == [*consecutive] else positions


@dataclass(frozen=True)
class TrainedCohort:
    """The results of the local work of a whole cohort.

    Attributes:
        share: Which process trained which client.
        broadcast: The global model w^t that the round began with, [numel].
        metrics: Means over the local steps of what ``training_step`` returned, [cohort] each.
        status: An :class:`UploadStatus` for each client, int8 [cohort].
        sends: Whether any client sends an upload.
        start_losses: The loss of w^t over all training data of each client, [cohort]; or empty.
        proposed: Names of the server states of which any client proposes a change.
        own: The results of this process's clients, with their uploads.
    """

    share: WorkShare
    broadcast: Tensor
    metrics: dict[str, Tensor]
    status: Tensor
    sends: bool
    start_losses: Tensor
    proposed: list[str]
    own: CohortResults

    @classmethod
    def join(
        cls, share: WorkShare, own: CohortResults, broadcast: Tensor, trained: tuple[str, ...]
    ) -> "TrainedCohort":
        """Join the results of all processes; in each of them the same.

        A client that sends nothing, where others do or the global model is trained, is broken.

        Args:
            share: Which process trained which client.
            own: The results of this process's clients.
            broadcast: The global model w^t that the round began with, [numel].
            trained: The models that are trained.
        """
        device = broadcast.device
        tables = {("metrics", name): values for name, values in own.metrics.items()}
        if own.status is not None:
            tables["status", ""], tables["sends", ""] = own.status, own.sends
        if own.start_losses is not None:
            tables["start_losses", ""] = own.start_losses
        tables |= {("proposals", name): own.sends for name in own.proposals}
        joined = share.join(tables, device)
        metrics = {name: values for (kind, name), values in joined.items() if kind == "metrics"}
        status, sends = joined["status", ""], joined["sends", ""].to(device)
        num_senders = int(sends.count_nonzero())
        if num_senders < len(sends) and (num_senders or "global" in trained):
            status = torch.where(sends, status, UploadStatus.MALFORMED)
        return cls(
            share=share,
            broadcast=broadcast,
            metrics=metrics,
            status=status,
            sends=num_senders > 0,
            start_losses=joined.get(("start_losses", ""), metrics["loss"][:0]),
            proposed=[name for kind, name in joined if kind == "proposals"],
            own=own,
        )

    @property
    def clients(self) -> Tensor:
        """The ids of the cohort, int64 [cohort]."""
        return self.share.cohort

    @property
    def losses(self) -> Tensor:
        """Mean training loss of each client over its local steps, [cohort]."""
        return self.metrics["loss"]

    @cached_property
    def valid(self) -> Tensor:
        """Which clients' results can be used, bool [cohort]."""
        return self.status == UploadStatus.VALID

    @cached_property
    def num_broken(self) -> int:
        """The number of clients whose results cannot be used."""
        return len(self.valid) - int(self.valid.count_nonzero())

    def valid_states(self) -> tuple[WorkShare, list[tuple[Tensor, dict[str, Tensor]]]]:
        """Return what this process's valid clients keep: ids and states, chunk by chunk.

        Returns:
            The share of the valid clients of the cohort, and the states.
        """
        if not self.num_broken:
            return self.share, self.own.states
        valid = self.valid.cpu()
        clients, states = self.clients[valid], []
        for ids, rows in self.own.states:
            selected = torch.isin(ids, clients)
            states.append((ids[selected], {name: row[selected] for name, row in rows.items()}))
        return self.share.select(valid), states
