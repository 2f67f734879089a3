"""The local work of a round, put together from chunks of clients."""

from collections.abc import Mapping

import torch
from torch import Tensor

GLOBAL_STATISTICS = "global.statistics"
"""The name under which clients propose running statistics of the global model."""


class Trained:
    """What the local work of this process's clients gives, put together from chunks.

    Args:
        number: Of how many clients.
        room: Where uploads were put in the round before: memory that is used once more, as new
            memory of that size would be given by the system page by page.

    Attributes:
        room: Where they are put in this round; ``None`` if one chunk gave them all.
        uploads: Shape [clients, numel]; ``None`` if nothing is sent.
        proposals: What is proposed for what the server keeps, by name [clients, length].
        outputs: What ``training_step`` gave, each [clients], and what the round notes of each.
        states: What clients keep: ids and rows by name, for each chunk.

    All rows are usable: see :func:`pl_fed.functional.rows.usable_rows`.
    """

    def __init__(self, number: int, room: Tensor | None) -> None:
        self.number = number
        self.room = room
        self.uploads: Tensor | None = None
        self.proposals: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.states: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._proposers: dict[str, list[Tensor]] = {}

    def add(
        self,
        positions: Tensor,
        uploads: Tensor | None,
        proposals: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
    ) -> None:
        """Put in what a chunk gave, whose clients are those at some positions of the cohort."""
        for name, values in outputs.items():
            self.outputs[name] = self._with(self.outputs.get(name), positions, values)
        if uploads is not None:
            known = self._room_for(uploads) if self.uploads is None else self.uploads
            self.uploads = self._with(known, positions, uploads)
            self.room = None if self.uploads is uploads else self.uploads
            for name, some in proposals.items():
                self.proposals[name] = self._with(self.proposals.get(name), positions, some)
                self._proposers.setdefault(name, []).append(positions)

    def complete_proposals(self, current: Mapping[str, Tensor]) -> None:
        """Let clients that propose nothing, where others do, propose what the server has.

        Args:
            current: What the server has, by name, each [length].
        """
        for name, proposers in self._proposers.items():
            if sum(map(len, proposers)) < self.number:
                silent = torch.ones(self.number, dtype=torch.bool)
                silent[torch.cat(proposers)] = False
                self.proposals[name][silent.to(current[name].device)] = current[name]

    def states_of(self, chosen: Tensor) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Return what some clients keep, by their ids: those that are not broken."""
        found = []
        for clients, states in self.states:
            here = torch.isin(clients, chosen)
            found.append((clients[here], {name: row[here] for name, row in states.items()}))
        return found

    def changeable_uploads(self, uploads: Tensor) -> Tensor:
        """Return the uploads; a copy if clients gave that very tensor, who may keep it."""
        return uploads.clone() if self.room is None else uploads

    def _with(self, rows: Tensor | None, positions: Tensor, some: Tensor) -> Tensor:
        if rows is None:
            if len(some) == self.number and positions.equal(torch.arange(self.number)):
                return some
            rows = some.new_empty(self.number, *some.shape[1:])
        first, last = int(positions[0]), int(positions[0]) + len(positions)
        if positions.equal(torch.arange(first, last)):
            rows[first:last] = some
        else:
            rows[positions.to(rows.device)] = some
        return rows

    def _room_for(self, uploads: Tensor) -> Tensor | None:
        """Return the room of the round before, if it is needed and fits."""
        room, shape = self.room, (self.number, *uploads.shape[1:])
        if room is None or len(uploads) == self.number or room.shape != shape:
            return None
        return room if room.dtype == uploads.dtype and room.device == uploads.device else None
