"""The settings of a run that its trainer sets."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from pl_fed.data.batches import BatchRule
from pl_fed.data.module import FederatedData
from pl_fed.distributed.processes import Processes
from pl_fed.engine import LocalSettings


@dataclass(frozen=True)
class RunSettings:
    """Run settings: the settings of a run that its trainer sets.

    Attributes:
        local: Precision, gradient clipping and accumulation of the local steps.
        limit_local_steps: Limit of a client's local steps in a round: a number (int) or a fraction
            (float); ``None`` sets no limit.
        shuffle: Whether each pass over a client's data has its own order.
        rounds: Number of rounds of the run; may be infinite.
        seconds_left: Returns the time left for the run, in seconds.
        processes: The processes that divide the clients among them.
    """

    local: LocalSettings = field(default_factory=LocalSettings)
    limit_local_steps: int | float | None = None
    shuffle: bool = True
    rounds: float = 0.0
    seconds_left: Callable[[], float] = lambda: math.inf
    processes: Processes = field(default_factory=Processes)

    def build_batch_rule(self, datamodule: FederatedData) -> BatchRule:
        """Return how the samples of clients become minibatches."""
        return BatchRule(
            datamodule.batch_size,
            datamodule.drop_last,
            self.shuffle,
            self.limit_local_steps,
            datamodule.min_batch,
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which models run, for example of mixed precision."""
        return self.local.autocast()

    def autocast_dtype(self, device_type: str) -> torch.dtype | None:
        """Return the dtype of products under mixed precision; ``None`` without it.

        Args:
            device_type: The type of the device of the models, such as ``"cpu"``.
        """
        with self.autocast():
            is_mixed = torch.is_autocast_enabled(device_type)
            return torch.get_autocast_dtype(device_type) if is_mixed else None
