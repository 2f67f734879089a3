"""The meeting of processes, with a time limit of its own."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pl_fed.distributed.processes import note_meeting

_LIMIT = timedelta(minutes=30)  # PyTorch's default; `limit_meeting` ends earlier, with a sentence


def meet_patiently(strategy: Any) -> None:
    """Apply a short ``trainer.strategy.timeout`` only after all processes have met; note when.

    The time-out is for processes that hang in a round. On a busy machine, a process may need more
    time to start. Without this function, the others would give up, and the late process would
    report a second error.

    Args:
        strategy: Lightning's strategy; only one with several processes has a time-out.
    """
    set_up = getattr(strategy, "setup_distributed", None)
    if set_up is None:
        return
    timeout: Any = getattr(strategy, "_timeout", None)
    is_short = timeout is not None and timeout < _LIMIT and hasattr(dist, "set_timeout")

    def set_up_patiently() -> None:
        """Create the process group, a short time-out being longer until it exists."""
        if is_short:
            strategy._timeout = _LIMIT
        try:
            set_up()
        finally:
            if is_short:
                strategy._timeout = timeout
        note_meeting()
        if is_short:
            dist.set_timeout(timeout)

    strategy.setup_distributed = set_up_patiently
