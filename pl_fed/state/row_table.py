"""Rows by client id: first in blocks of memory, then in a file."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from pl_fed.devices import to_device
from pl_fed.state.disk_rows import DiskRows

_BLOCK_BYTES = 1 << 26


class RowTable:
    """Row table: rows by client id; a client takes the next free slot at its first write.

    Therefore memory, disk and checkpoints contain only the written rows, without gaps, for any
    number of clients.

    Args:
        num_clients: Number of clients.
        default: The row, shape [numel], of a client before its first write. The table does not copy
            it.
        choose_device: Returns the device for a block of the given number of bytes, or ``None`` if
            no memory is left.
        folder: Returns the folder for the file of further rows.

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
        choose_device: Callable[[int], torch.device | None],
        folder: Callable[[], Path],
    ) -> None:
        self.default = default
        self.disk: DiskRows | None = None
        self._choose_device, self._folder = choose_device, folder
        self._slots = torch.full((num_clients,), -1, dtype=torch.int32)
        self._used = 0
        self._blocks: list[Tensor] = []
        self._block_rows = max(1, min(num_clients, _BLOCK_BYTES // max(1, default.nbytes)))

    def read(self, clients: Tensor) -> Tensor:
        """Return copies of the clients' rows, shape [clients, numel], on the default's device."""
        parts = list(self._parts(self._slots[clients]))
        if len(parts) == 1 and len(parts[0][1]) == len(clients):
            block, _, offsets = parts[0]
            return to_device(self._read(block, offsets), self.default)
        rows = self.default.expand(len(clients), -1).clone()
        for block, positions, offsets in parts:
            rows[to_device(positions, rows)] = to_device(self._read(block, offsets), rows)
        return rows

    def write(self, clients: Tensor, rows: Tensor) -> None:
        """Write the clients' rows, shape [clients, numel].

        Raises:
            OSError: If the rows go to a disk, and it is full.
        """
        if not self.default.numel():
            return
        slots = self._slots[clients]
        new = slots < 0
        used = self._used + int(new.sum())
        slots[new] = torch.arange(self._used, used, dtype=torch.int32)
        while self.disk is None and used > len(self._blocks) * self._block_rows:
            self._grow()
        rows = rows.detach().to(self.default.dtype)
        for block, positions, offsets in self._parts(slots):
            is_complete = len(positions) == len(clients)
            self._write(block, offsets, rows if is_complete else rows[to_device(positions, rows)])
        self._slots[clients] = slots
        self._used = used

    def prefetch(self, clients: Tensor) -> None:
        """Let the system read the clients' rows on disk in the background."""
        if self.disk is not None:
            for block, _, offsets in self._parts(self._slots[clients]):
                if block == len(self._blocks):
                    self.disk.prefetch(offsets.tolist())

    def clients(self) -> Tensor:
        """Return the ids of the clients with a written row, in the order of their slots."""
        written = (self._slots >= 0).nonzero().flatten()
        clients = torch.empty(self._used, dtype=torch.int64)
        clients[self._slots[written].long()] = written
        return clients

    def pieces(self) -> list[Tensor]:
        """Return the written rows in the order of their slots, in pieces [rows, numel].

        Full blocks and rows on disk are shared with the table. Only the last block is copied.
        """
        capacity = len(self._blocks) * self._block_rows
        num_full, remainder = divmod(min(self._used, capacity), self._block_rows)
        pieces = self._blocks[:num_full]
        if remainder:
            pieces.append(self._blocks[num_full][:remainder].clone())
        if self.disk is not None:
            pieces += self.disk.pieces(self._used - capacity, self._block_rows)
        return pieces

    def _parts(self, slots: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Group slots by block, and yield (block, positions in ``slots``, offsets in the block).

        Slots below 0 are skipped. The file counts as the last block.
        """
        blocks = (slots // self._block_rows).clamp(max=len(self._blocks))
        for block in blocks[slots >= 0].unique().tolist():
            positions = ((blocks == block) & (slots >= 0)).nonzero().flatten()
            yield block, positions, slots[positions] - block * self._block_rows

    def _read(self, block: int, offsets: Tensor) -> Tensor:
        if self.disk is not None and block == len(self._blocks):
            return self.disk.read(offsets.tolist())
        stored = self._blocks[block]
        return stored[to_device(offsets, stored)]

    def _write(self, block: int, offsets: Tensor, rows: Tensor) -> None:
        if self.disk is not None and block == len(self._blocks):
            self.disk.write(offsets.tolist(), rows.cpu())
        else:
            stored = self._blocks[block]
            stored[to_device(offsets, stored)] = to_device(rows, stored)

    def _grow(self) -> None:
        """Allocate another block; without free memory, write all further rows to disk."""
        shape = (self._block_rows, self.default.numel())
        while True:
            device = self._choose_device(self._block_rows * self.default.nbytes)
            if device is None:
                self.disk = DiskRows(self.default, self._folder())
                return
            try:
                with torch.inference_mode(False):  # inference tensors cannot be written later
                    block = torch.empty(shape, dtype=self.default.dtype, device=device)
            except torch.OutOfMemoryError:  # something else took the budget: try the next device
                continue
            self._blocks.append(block)
            return
