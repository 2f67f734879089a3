"""Which engine runs the clients, and how many at a time."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.engine.base import Chunk, Clipping
from pl_fed.engine.one_by_one import OneByOne
from pl_fed.engine.stacked import CannotStackError, Stacked
from pl_fed.state import free_memory

EngineName = Literal["auto", "one_by_one", "stacked"]


class EngineChoice:
    """Runs chunks by the engine asked for; one by one where clients turn out not to stack.

    Args:
        name: ``"one_by_one"``; ``"stacked"``; or ``"auto"``: stacked on a GPU, else one by one.
        chunk_size: Clients that are run at a time; ``None`` takes as many as fit into memory.
    """

    def __init__(self, name: EngineName = "auto", chunk_size: int | None = None) -> None:
        self.name = name
        self.chunk_size = chunk_size
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.clipping = Clipping()
        self._stackable = True

    def run(
        self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> dict[str, Tensor]:
        """Train the chunk's rows in place: see :meth:`Engine.run`."""
        if self._stacks(client):
            try:
                return Stacked(self.autocast, self.clipping).run(client, optimizer, chunk)
            except CannotStackError as error:
                self._stackable = False
                rank_zero_warn(f"Clients are run one by one, as they cannot be stacked: {error}.")
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
        # a row, its gradient, two of optimizer state and two in passing; activations by guess
        needed = 6 * len(client.trains) * row.nbytes + 64 * batch_bytes
        return max(1, min(cohort, int(0.5 * free_memory(row.device) / needed)))

    def _stacks(self, client: Client) -> bool:
        if not self._stackable or self.name == "one_by_one":
            return False
        return self.name == "stacked" or client.device.type == "cuda"
