"""Which engine runs the clients, and how many at a time."""

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.engine.base import Chunk, Clipping
from pl_fed.engine.one_by_one import OneByOne
from pl_fed.engine.stacked import CannotStackError, Stacked
from pl_fed.state import free_memory

_ROWS_BYTES = 1 << 23  # rows that are run one by one before the next clients' are loaded

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h

EngineName = Literal["auto", "one_by_one", "stacked"]


class EngineChoice:
    """Runs chunks by the engine asked for; one by one where clients turn out not to stack.

    Args:
        name: ``"one_by_one"``; ``"stacked"``; or ``"auto"``: stacked on a GPU, else one by one.
        chunk_size: Clients that are run at a time; ``None`` takes as many as fit into memory, and
            few where they are run one by one.
    """

    def __init__(self, name: EngineName = "auto", chunk_size: int | None = None) -> None:
        self.name = name
        self.chunk_size = chunk_size
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.clipping = Clipping()
        self._checked: Client | None = None
        self._stackable = False

    def run(
        self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> dict[str, Tensor]:
        """Train the chunk's rows in place: see :meth:`Engine.run`."""
        keep_freed_memory()
        if self._stacks(client, optimizer, chunk):
            return Stacked(self.autocast, self.clipping).run(client, optimizer, chunk)
        return OneByOne(self.autocast, self.clipping).run(client, optimizer, chunk)

    def clients_at_a_time(self, client: Client, cohort: int, batch_bytes: int) -> int:
        """Return how many clients of a cohort to run at a time.

        Args:
            client: The algorithm.
            cohort: Clients in the cohort.
            batch_bytes: Size of a minibatch's inputs.
        """
        if self.chunk_size is not None:
            return self.chunk_size
        row = client.row("global").data
        if not self._wanted(client):
            return max(1, min(cohort, _ROWS_BYTES // row.nbytes))
        # a row, its gradient, two of optimizer state and two in passing; activations by guess
        needed = 6 * len(client.trains) * row.nbytes + 64 * batch_bytes
        return max(1, min(cohort, int(0.5 * free_memory(row.device) / needed)))

    def _stacks(self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk) -> bool:
        wanted = self._wanted(client)
        if wanted and self._checked is not client:
            self._checked, self._stackable = client, True
            try:
                Stacked(self.autocast, self.clipping).check(client, optimizer, chunk)
            except CannotStackError as error:
                self._stackable = False
                rank_zero_warn(f"Clients are run one by one, as they cannot be stacked: {error}.")
        return wanted and self._stackable

    def _wanted(self, client: Client) -> bool:
        """Whether clients are to be stacked, if they can be."""
        if self._checked is client:
            return self._stackable
        return self.name == "stacked" or (self.name == "auto" and client.device.type == "cuda")


@cache
def keep_freed_memory() -> None:
    """Let glibc keep blocks that are freed for the next round, up to 256 MB.

    It gives them back to the system otherwise and gets them again page by page, which takes small
    models up to a third of a round.
    """
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_M_MMAP_THRESHOLD, 1 << 25)
        mallopt(_M_TRIM_THRESHOLD, 1 << 28)
