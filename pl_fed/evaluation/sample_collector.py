"""Collects the outputs and targets of each client until all its samples are there."""

from collections.abc import Iterator

from torch import Tensor

from pl_fed.trees import Tree, join, leaves, select

_MAX_BYTES = 1 << 28  # bytes of one client's outputs that are collected


class SampleCollector:
    """Sample collector: collects the samples of each client from batches of several clients.

    If a client's outputs take more than 256 MB, its samples are returned in parts.

    Args:
        sizes: Number of samples of each client.
    """

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self._missing = list(sizes)
        self._pieces: dict[int, list[tuple[Tree, Tree]]] = {}

    def add(
        self, positions: Tensor, outputs: Tree, targets: Tree
    ) -> Iterator[tuple[int, Tree, Tree]]:
        """Add samples, and yield the position, outputs and targets of each complete client.

        Args:
            positions: The position of each sample's client, int64 [samples].
            outputs: A model's outputs for the samples.
            targets: The samples' targets.
        """
        for position in positions.unique().tolist():
            own = (positions == position).nonzero().flatten()
            pieces = self._pieces.setdefault(position, [])
            pieces.append((select(outputs, own), select(targets, own)))
            self._missing[position] -= len(own)
            if not self._missing[position] or _count_bytes(pieces) > _MAX_BYTES:
                del self._pieces[position]
                yield position, join([o for o, _ in pieces]), join([t for _, t in pieces])

    def is_complete(self, position: int) -> bool:
        """Return whether all samples of the client at a position were added."""
        return not self._missing[position]

    def forget(self, position: int) -> None:
        """Discard the samples of the client at a position."""
        self._missing[position] = self._sizes[position]
        self._pieces.pop(position, None)


def _count_bytes(pieces: list[tuple[Tree, Tree]]) -> int:
    return sum(leaf.nbytes for outputs, _ in pieces for leaf in leaves(outputs))
