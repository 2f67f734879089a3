"""Outputs and targets of clients, kept until those of a client are complete."""

from collections.abc import Iterator

from torch import Tensor

from pl_fed.trees import Tree, join, leaves, select

_MOST_BYTES = 1 << 28  # of one client's outputs that are kept to be judged together


class WaitingSamples:
    """Brings the samples of each client together, of which batches hold those of several.

    Samples of a client whose outputs take more than 256 MB are given in parts.

    Args:
        sizes: The number of samples of each client.
    """

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self._missing = list(sizes)
        self._waiting: dict[int, list[tuple[Tree, Tree]]] = {}

    def add(
        self, positions: Tensor, outputs: Tree, targets: Tree
    ) -> Iterator[tuple[int, Tree, Tree]]:
        """Add samples, and yield the position, outputs and targets of clients that are complete.

        Args:
            positions: The position of the client of each sample, int64 [samples].
            outputs: What a model makes of the samples.
            targets: Their targets.
        """
        for position in positions.unique().tolist():
            own = (positions == position).nonzero().flatten()
            waiting = self._waiting.setdefault(position, [])
            waiting.append((select(outputs, own), select(targets, own)))
            self._missing[position] -= len(own)
            if not self._missing[position] or _bytes(waiting) > _MOST_BYTES:
                pieces = self._waiting.pop(position)
                yield position, join([o for o, _ in pieces]), join([t for _, t in pieces])

    def is_complete(self, position: int) -> bool:
        """Return whether all samples of the client at a position have come."""
        return not self._missing[position]

    def forget(self, position: int) -> None:
        """Begin again with the client at a position."""
        self._missing[position] = self._sizes[position]
        self._waiting.pop(position, None)


def _bytes(waiting: list[tuple[Tree, Tree]]) -> int:
    return sum(leaf.nbytes for outputs, _ in waiting for leaf in leaves(outputs))
