"""The channel of the uploads: compression between a client and the server."""

from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.client_rounds import COMPRESSION
from pl_fed.compressors import Compressor
from pl_fed.devices import to_device
from pl_fed.nets.fingerprints import is_by_user
from pl_fed.nets.rows import RowLayout
from pl_fed.random import fork_all_generators, key, read_generators

_PIECE = 1 << 24  # numbers of uploads that a codec compresses at a time: draws take 8 bytes each
_ULPS = 8  # numbers that differ by up to so many units of rounding are equal


class UploadChannel:
    """Upload channel: returns the clients' uploads as the server receives them.

    A client compresses the part of its upload that crosses the network. The restored row
    has zeros elsewhere. Attackers send through the same channel.

    Args:
        compressor: The codec.
        client: The algorithm; its ``sent_layout`` names the part that crosses the network.
        seed: The seed of the federation; it keys the codec's draws with the round and the client.
    """

    def __init__(self, compressor: Compressor, client: Client, seed: int) -> None:
        self.compressor = compressor
        self.client = client
        self.seed = seed

    @cached_property
    def layout(self) -> RowLayout:
        """The layout of the part that crosses the network; an algorithm without one is refused."""
        return cast(RowLayout, self.client.sent_layout)

    @cached_property
    def _positions(self) -> Tensor | None:
        """The positions of the sent part in a row, int64; ``None`` for the whole row."""
        layout = self.client.row("global").layout
        if self.layout.numel == layout.numel:
            return None
        return layout.positions(*self.layout.names)

    def send(
        self, uploads: Tensor, clients: Tensor, round: int, memory: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the uploads as the server receives them, and the clients' new memory.

        Args:
            uploads: The clients' uploads, [clients, numel].
            clients: The clients' ids, int64 [clients].
            round: The round, from 0.
            memory: The rows that the clients keep, by the names in the store.

        Returns:
            Rows [clients, numel], of NaN for an upload that is not finite; and the new rows by the
            names in the store.
        """
        draws = [key(self.seed, "compression", round, client) for client in clients.tolist()]
        positions = None if self._positions is None else to_device(self._positions, uploads)
        rows = uploads if positions is None else uploads[:, positions]
        length = max(1, _PIECE // self.layout.numel)
        pieces = []
        for begin in range(0, len(rows), length):
            part = slice(begin, begin + length)
            own = {name.removeprefix(COMPRESSION): row[part] for name, row in memory.items()}
            pieces.append(self._send(rows[part], draws[part], own))
        received = torch.cat([piece for piece, _ in pieces])
        if positions is not None:
            received = torch.zeros_like(uploads).index_copy_(1, positions, received)
        new_memory = {
            name: torch.cat([own[name.removeprefix(COMPRESSION)] for _, own in pieces])
            for name in memory
        }
        return received, new_memory

    def _send(
        self, rows: Tensor, draws: list[int], memory: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return rows as the server receives them, and the clients' new memory.

        A codec of the user's class that draws from global generators sends the rows one by one,
        with the key of each client: its draws then depend on neither the cohort nor a resume.

        Args:
            rows: The rows to send, [clients, numel].
            draws: The key of each client's draws.
            memory: The clients' rows by the codec's names.
        """
        keys = to_device(torch.tensor(draws)[:, None], rows)
        if not is_by_user(self.compressor):
            return self.compressor.send(rows, self.layout, keys, memory)
        with fork_all_generators(rows.device) as seed:
            seed(draws[0])
            before = read_generators()
            sent = self.compressor.send(rows, self.layout, keys, memory)
            if len(rows) == 1 or (rows.is_cpu and read_generators() == before):
                return sent
            parts = []
            for position, draw in enumerate(draws):
                seed(draw)
                part = slice(position, position + 1)
                own = {name: row[part] for name, row in memory.items()}
                parts.append(self.compressor.send(rows[part], self.layout, keys[part], own))
        received = torch.cat([row for row, _ in parts])
        return received, {name: torch.cat([own[name] for _, own in parts]) for name in parts[0][1]}

    def carry(self, forged: Tensor, own: Tensor, clients: Tensor, round: int) -> Tensor:
        """Return forged uploads as the server receives them: a single message of a new client.

        A multiple of an attacker's own upload, as of a flipped sign, is that multiple of its
        message: this upload has gone through the channel already, with the same draws.

        Args:
            forged: The attackers' uploads, [attackers, numel].
            own: The uploads that the attackers would send, as the server would receive them.
            clients: The attackers' ids, int64 [attackers].
            round: The round, from 0.
        """
        defaults = self.client.compression_defaults
        memory = {name: row.expand(len(forged), -1) for name, row in defaults.items()}
        sent = self.send(forged, clients, round, memory)[0]
        return forged.where(_mark_multiples(forged, own), sent)

    def count_bytes(self, number_bytes: int) -> int:
        """Return the bytes of a compressed upload.

        Args:
            number_bytes: The bytes of an uncompressed number.
        """
        return -(-self.compressor.count_bits(self.layout, 8 * number_bytes) // 8)


def _mark_multiples(rows: Tensor, others: Tensor) -> Tensor:
    """Return a mask of the rows that are multiples of other rows, but for rounding, [n, 1].

    Example:
        >>> _mark_multiples(torch.tensor([[3.0, 0.0], [3.0, 0.1]]), torch.tensor([[1.0, 0.0]] * 2))
        tensor([[ True],
                [False]])
    """
    numbers, originals = rows.double(), others.double()
    products = (numbers * originals).sum(1, keepdim=True)
    multiples = products / originals.square().sum(1, keepdim=True) * originals
    rounding = _ULPS * torch.finfo(rows.dtype).eps * multiples.abs()
    return ((numbers - multiples).abs() <= rounding).all(1, keepdim=True)
