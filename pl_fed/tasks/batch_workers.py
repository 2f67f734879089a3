"""Batch workers: processes that read and join the batches that steps will ask for next."""

import multiprocessing
import multiprocessing.connection
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

Samples = list[list[int]]  # (position, key) of each sample of a batch
Read = Callable[[Samples], Any]  # returns a batch

_AHEAD = 2  # batches per worker that are read before a step asks for them
_reads: list[Read] = []  # in a worker: its function


class _Upcoming(NamedTuple):
    """Upcoming batch: its samples, and the bytes of the batch once it has been read."""

    samples: Samples
    content: Future[bytes]


class BatchWorkers:
    """Batch workers: read batches in the background, in the order of use by steps.

    Without such an order, or for a batch that is not in it, nothing is read ahead, and
    :meth:`take` returns ``None``. Batches come as bytes, since a batch of many tensors in shared
    memory could need more open files than a process may have.

    Args:
        read: Returns a batch of samples; also in another process.
        num_workers: Number of processes; 0 reads nothing ahead.
    """

    def __init__(self, read: Read, num_workers: int) -> None:
        self.read = read
        self.num_workers = num_workers
        self._order: Iterator[Samples] = iter(())
        self._upcoming: deque[_Upcoming] = deque()
        self._last: tuple[Samples, bytes] = ([], b"")
        self._pool: ProcessPoolExecutor | None = None
        self._process = 0  # that started the pool: a fork has none

    def expects(self, samples: Samples) -> bool:
        """Return whether a batch is the next one that was read ahead."""
        return bool(self._upcoming) and self._upcoming[0].samples == samples

    def begin(self, order: Iterable[Samples]) -> None:
        """Read ahead batches in an order; batches of the order before it are dropped.

        Args:
            order: The samples of each batch.

        Raises:
            RuntimeError: If a worker has ended.
        """
        self.stop()
        self._order = iter(order)
        with self._explain_loss():
            for _ in range(_AHEAD * self.num_workers):
                self._submit_next()

    def take(self, samples: Samples) -> tuple[Any] | None:
        """Return the next batch, or that before it again; ``None`` if it was not read ahead.

        A batch is a new object each time, because a step may change it. An error of the user's code
        gives ``None`` too: it comes again where the batch is read in this process.

        Raises:
            RuntimeError: If a worker has ended.
        """
        if self.expects(samples):
            content = self._upcoming.popleft().content
            with self._explain_loss():
                self._submit_next()
                try:
                    self._last = samples, content.result()
                except BrokenProcessPool:
                    raise
                except Exception:
                    return None
        return (pickle.loads(self._last[1]),) if self._last[0] == samples else None

    def stop(self) -> None:
        """Drop the batches that were read ahead."""
        for upcoming in self._upcoming:
            upcoming.content.cancel()
        self._upcoming.clear()
        self._order = iter(())
        self._last = ([], b"")

    def end(self) -> None:
        """Drop the batches that were read ahead, and end the processes."""
        self.stop()
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without processes and batches, for copies and other processes."""
        empty: dict[str, Any] = {"_order": iter(()), "_upcoming": deque(), "_pool": None}
        return {**vars(self), **empty}

    @contextmanager
    def _explain_loss(self) -> Iterator[None]:
        """Replace the error about a worker that has ended, and start new ones next time."""
        try:
            yield
        except BrokenProcessPool as error:
            self.stop()
            self._pool = None
            raise RuntimeError(
                "Expected the processes of `data.dataset.num_workers` to go on but one has ended,"
                " perhaps for lack of memory: set a smaller number, or 0 to read in the main"
                " process."
            ) from error

    def _submit_next(self) -> None:
        samples = next(self._order, None)
        if samples is not None:
            content = self._start_pool().submit(_read_in_worker, samples)
            self._upcoming.append(_Upcoming(samples, content))

    def _start_pool(self) -> ProcessPoolExecutor:
        """Return the processes; starts them for the first batch."""
        if self._pool is None or self._process != os.getpid():
            self._process = os.getpid()
            self._pool = ProcessPoolExecutor(
                self.num_workers,
                multiprocessing.get_context(),
                _prepare_worker,
                (self.read,),
            )
        return self._pool


def _prepare_worker(read: Read) -> None:
    """Make a worker read by a function, with one thread, and end with its parent."""
    _reads[:] = [read]
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    """End this process as soon as another one has ended."""
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def _read_in_worker(samples: Samples) -> bytes:
    return pickle.dumps(_reads[0](samples), pickle.HIGHEST_PROTOCOL)
