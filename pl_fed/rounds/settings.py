"""The settings of a run that its trainer decides."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from pl_fed.distributed.processes import Processes
from pl_fed.engine import LocalSettings


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run that its trainer decides.

    Attributes:
        local: Precision and gradient clipping of the local steps.
        limit_local_steps: Most local steps of a round: a number, a fraction, or ``None``.
        shuffle: Whether each pass over a client's data has an order of its own.
        rounds: How many rounds the run has; may be infinite.
        seconds_left: Returns how long it may still take.
        processes: The processes that share the clients.
    """

    local: LocalSettings = field(default_factory=LocalSettings)
    limit_local_steps: int | float | None = None
    shuffle: bool = True
    rounds: float = 0.0
    seconds_left: Callable[[], float] = lambda: math.inf
    processes: Processes = field(default_factory=Processes)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which models run: mixed precision, or none."""
        return self.local.autocast()
