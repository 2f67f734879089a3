"""The meeting of processes, with a time limit of its own."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

_LIMIT = timedelta(minutes=30)  # PyTorch's default; `limit_meeting` ends earlier, with a sentence


def meet_patiently(strategy: Any) -> None:
    """Apply a short ``trainer.strategy.timeout`` only after all processes have met.

    The time-out is for processes that hang in a round. On a busy machine, a process may need more
    time to start. Without this function, the others would give up, and the late process would
    report a second error.

    Args:
        strategy: Lightning's strategy; only one with several processes has a time-out.
    """
    timeout = getattr(strategy, "_timeout", None)
    if timeout is None or timeout >= _LIMIT or not hasattr(dist, "set_timeout"):
        return
    set_up = strategy.setup_distributed

    def set_up_patiently() -> None:
        """Create the process group with the longer limit, and then set the time-out."""
        strategy._timeout = _LIMIT
        try:
            set_up()
        finally:
            strategy._timeout = timeout
        dist.set_timeout(timeout)

    strategy.setup_distributed = set_up_patiently
