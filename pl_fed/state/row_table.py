"""One row for each client that was written: in blocks of memory, and beyond them in a file."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from pl_fed.state.disk_rows import DiskRows

_BLOCK_BYTES = 1 << 26


class RowTable:
    """Rows by client id. A client takes the next free place when it is first written.

    So memory, disk and checkpoints hold the rows that were written, one behind the other, however
    many clients there are.

    Args:
        num_clients: Number of clients.
        default: The row, shape [numel], of a client that was not written; kept, not copied.
        room: Returns the device for a block of so many bytes, or ``None`` when memory is used up.
        folder: Returns where rows go then.

    Example:
        >>> table = RowTable(9, torch.zeros(2), lambda size: torch.device("cpu"), Path)
        >>> table.write(torch.tensor([7]), torch.ones(1, 2))
        >>> table.read(torch.tensor([7, 8])).tolist()
        [[1.0, 1.0], [0.0, 0.0]]
    """

    def __init__(
        self,
        num_clients: int,
        default: Tensor,
        room: Callable[[int], torch.device | None],
        folder: Callable[[], Path],
    ) -> None:
        self.default = default
        self.disk: DiskRows | None = None
        self._room, self._folder = room, folder
        self._places = torch.full((num_clients,), -1, dtype=torch.int32)
        self._used = 0
        self._blocks: list[Tensor] = []
        self._block = max(1, min(num_clients, _BLOCK_BYTES // max(1, default.nbytes)))

    def read(self, clients: Tensor) -> Tensor:
        """Return copies of the clients' rows, shape [clients, numel], on the default's device."""
        places = self._places[clients]
        parts = list(self._parts(places))
        if len(parts) == 1 and len(parts[0][1]) == len(clients):
            return self._read(parts[0][0], parts[0][2]).to(self.default.device)
        rows = self.default.expand(len(clients), -1).clone()
        for number, where, inside in parts:
            rows[where.to(rows.device)] = self._read(number, inside).to(rows.device)
        return rows

    def write(self, clients: Tensor, rows: Tensor) -> None:
        """Keep the clients' rows, shape [clients, numel].

        Raises:
            OSError: If they go to a disk, and it is full.
        """
        if not self.default.numel():
            return
        places = self._places[clients]
        new = places < 0
        used = self._used + int(new.sum())
        places[new] = torch.arange(self._used, used, dtype=torch.int32)
        while self.disk is None and used > len(self._blocks) * self._block:
            self._grow()
        rows = rows.detach().to(self.default.dtype)
        for number, where, inside in self._parts(places):
            all_of_them = len(where) == len(clients)
            self._write(number, inside, rows if all_of_them else rows[where.to(rows.device)])
        self._places[clients] = places
        self._used = used

    def prefetch(self, clients: Tensor) -> None:
        """Let the system read rows that are on disk ahead."""
        if self.disk is not None:
            for number, _, inside in self._parts(self._places[clients]):
                if number == len(self._blocks):
                    self.disk.prefetch(inside.tolist())

    def clients(self) -> Tensor:
        """Return the clients that were written, in the order of their places."""
        written = (self._places >= 0).nonzero().flatten()
        clients = torch.empty(self._used, dtype=torch.int64)
        clients[self._places[written].long()] = written
        return clients

    def pieces(self) -> list[Tensor]:
        """Return their rows, in pieces [rows, numel].

        Full blocks are shared with the table, and so is what is on disk: nothing but the last block
        is copied.
        """
        full, rest = divmod(min(self._used, len(self._blocks) * self._block), self._block)
        pieces = self._blocks[:full]
        if rest:
            pieces.append(self._blocks[full][:rest].clone())
        if self.disk is not None:
            pieces += self.disk.pieces(self._used - len(self._blocks) * self._block, self._block)
        return pieces

    def _parts(self, places: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (block, which of the places, where in the block); the file is the last block."""
        numbers = (places // self._block).clamp(max=len(self._blocks))
        for number in numbers[places >= 0].unique().tolist():
            where = ((numbers == number) & (places >= 0)).nonzero().flatten()
            yield number, where, places[where] - number * self._block

    def _read(self, number: int, inside: Tensor) -> Tensor:
        if self.disk is not None and number == len(self._blocks):
            return self.disk.read(inside.tolist())
        block = self._blocks[number]
        return block[inside.to(block.device)]

    def _write(self, number: int, inside: Tensor, rows: Tensor) -> None:
        if self.disk is not None and number == len(self._blocks):
            self.disk.write(inside.tolist(), rows.cpu())
        else:
            block = self._blocks[number]
            block[inside.to(block.device)] = rows.to(block.device)

    def _grow(self) -> None:
        """Make room for another block, or go to disk for good."""
        device = self._room(self._block * self.default.nbytes)
        if device is None:
            self.disk = DiskRows(self.default, self._folder())
            return
        with torch.inference_mode(False):  # rows made within it could not be written without
            shape = (self._block, self.default.numel())
            self._blocks.append(torch.empty(shape, dtype=self.default.dtype, device=device))
