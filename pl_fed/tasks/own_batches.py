"""Own batches: minibatches as a data set and its collate function make them, read in each step."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_fed.nets.fingerprints import Fingerprints
from pl_fed.random import fork_all_generators, key
from pl_fed.tasks.batch_workers import BatchWorkers, Samples

Collate = Callable[[list[Any]], Any]
LEFT_OUT = (
    "If `collate_fn` leaves samples out, sizes of clients and means over batches count them: give a"
    " torch.utils.data.Subset of the others."
)
"""The consequence of a collate function that leaves samples out, and the remedy."""


class OwnBatches:
    """Own batches: reads the samples of a minibatch, and joins them by the user's collate function.

    The federation then holds a row for each sample: its position in the data set, and a key. A
    step asks for the batch of its rows, as a DataLoader would make it of these samples: of any
    type, without padding, and not copied into tensors. If the data set draws at random, each sample
    is read under its key: a new one for each training minibatch, and a fixed one in evaluations.

    Args:
        dataset: The map-style data set, all parts one after another.
        collate: Joins a list of samples into a batch; or such a function for each part of the data
            set, by the position of the part's first sample. A batch is joined by the function of
            its first sample.
        draws: Whether reading or joining samples draws from the global generators of torch, numpy
            or python.
        reason: Why the samples are no tensors, for messages; empty if the user asked for own
            batches.
        num_workers: Number of processes that read batches of :meth:`read_ahead`; 0 reads
            each batch when a step asks for it. It changes no number.

    Attributes:
        size: The number of samples in a batch of an evaluation.
        datamodule: A LightningDataModule, whose batch hooks replace those of the module as in
            Lightning; ``None`` for a data set without one.

    Example:
        >>> batches = OwnBatches(["ab", "c", "def"], " ".join)
        >>> batches.join(batches.rows()[[2, 0]], None)
        'def ab'
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate | Mapping[int, Collate],
        draws: bool = False,
        reason: str = "",
        num_workers: int = 0,
    ) -> None:
        self.dataset = dataset
        self.collates = dict(collate) if isinstance(collate, Mapping) else {0: collate}
        self.draws = draws
        self.reason = reason
        self.size = 1
        self.datamodule: Any = None
        self._last: tuple[Samples, Any] = ([], None)
        self._needs_copies: dict[int, bool] = {}  # whether batches may change samples, by start
        self.set_workers(num_workers)

    def set_workers(self, number: int) -> None:
        """Let another number of processes read ahead; 0 for none."""
        self._workers = BatchWorkers(self._read, number)

    def rows(self) -> Tensor:
        """Return the rows of all samples, int64 [samples, 2]: position, and key in evaluations."""
        positions = range(len(self.dataset))
        keys = [key(0, "data set", position) if self.draws else 0 for position in positions]
        return torch.stack([torch.arange(len(keys)), torch.tensor(keys, dtype=torch.int64)], 1)

    def redraw(self, positions: list[int], keys: list[int]) -> tuple[Tensor, Tensor]:
        """Return the rows of samples with new keys, and zeros for targets."""
        rows = torch.tensor([positions, keys], dtype=torch.int64).T.contiguous()
        return rows, torch.zeros(len(rows))

    def forget(self) -> None:
        """Drop the samples of the last batch."""
        self._last = ([], None)

    def end_workers(self) -> None:
        """End the processes that read ahead; the next batch to read ahead starts new ones."""
        self._workers.end()

    def read_ahead(self, order: Callable[[], Iterator[Tensor]]) -> None:
        """Let the workers, if there are any, read the batches that steps will ask for next.

        Args:
            order: Returns the rows of each batch, int64 [batch, 2], in the order of use. Workers
                that already read the first one go on as they are.
        """
        if not self._workers.num_workers:
            return
        rows = order()
        first = next(rows, None)
        if first is not None and not self._workers.expects(first.tolist()):
            upcoming = (batch.tolist() for batch in chain([first], rows))
            self._workers.begin(upcoming)

    def join(self, rows: Tensor, targets: Any) -> Any:
        """Return the batch of some samples, on the CPU.

        Args:
            rows: Rows of the samples, int64 [batch, 2].
            targets: Left out: the batch has the data set's own.
        """
        samples: Samples = rows.tolist()
        try:
            prepared = self._workers.take(samples)
            return self._read(samples) if prepared is None else prepared[0]
        except Exception as error:
            positions = [position for position, _ in samples]
            error.add_note(f"pl_fed read samples {positions} of {type(self.dataset).__name__}.")
            raise

    def _read(self, samples: Samples) -> Any:
        """Read and join samples; for several models of a step, read them once."""
        positions = [position for position, _ in samples]
        if not self.draws:
            if self._last[0] != samples:
                self._last = samples, self._fetch(positions)
            return self._collate(positions[0])
        with fork_all_generators() as seed:
            if self._last[0] != samples:
                drawn = []
                for position, draw in samples:
                    seed(draw)
                    drawn.append(self.dataset[position])
                self._last = samples, drawn
            seed(key(samples[0][1], "collate"))
            return self._collate(positions[0])

    def _collate(self, first: int) -> Any:
        """Join the samples of the last batch by the function of its first sample.

        A step and the function may change samples in place, so that they get copies of these,
        unless the first batch shows that it shares nothing with them.
        """
        start = max(start for start in self.collates if start <= first)
        collate, samples = self.collates[start], self._last[1]
        if any(sample is None for sample in samples):
            warnings.warn(
                f"{type(self.dataset).__name__} has samples that are None. {LEFT_OUT}",
                stacklevel=2,
            )
        if not self._needs_copies.get(start, True):
            return collate([*samples])
        try:
            copies = copy.deepcopy([*samples])
        except Exception:  # of the user's own classes: the next model reads its samples anew
            self.forget()
            return collate([*samples])
        batch = collate([*copies])
        if start not in self._needs_copies:
            prints = [Fingerprints({}).compute(piece) for piece in (copies, [*samples])]
            self._needs_copies[start] = prints[0] != prints[1] or _share_objects(copies, batch)
        return batch

    def _fetch(self, positions: Sequence[int]) -> list[Any]:
        """Return samples, all at once if the data set can, as in a DataLoader."""
        if getattr(self.dataset, "__getitems__", None) is not None:
            return list(self.dataset.__getitems__(positions))
        return [self.dataset[position] for position in positions]


def _share_objects(first: Any, second: Any) -> bool:
    """Return whether two values have a mutable object, or the memory of a tensor, in common.

    Tensors of the second may have the memory of arrays of the first.
    """
    memos: list[dict[Any, Any]] = []
    for value in (first, second):
        memo: dict[Any, Any] = {}
        try:
            copy.deepcopy(value, memo)  # it notes each mutable object, and memory under "torch"
        except Exception:  # of the user's own classes
            return True
        memos += [memo.pop("torch", {}), memo]
    has_arrays = any(isinstance(value, np.ndarray) for value in memos[1].values())
    return has_arrays or any(memos[i].keys() & memos[i + 2].keys() for i in range(2))
