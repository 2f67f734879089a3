"""A view of one process, for code that belongs to one client."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist

_NOTHING_TO_HIDE = nullcontext()
_MISSING = object()


def _is_not_initialized() -> bool:
    return False


_HIDDEN: list[tuple[Any, str, Any]] = [
    (dist, "is_initialized", _is_not_initialized),
    (dist.distributed_c10d, "is_initialized", _is_not_initialized),
]


def hide_in_steps(owner: type, **values: Any) -> None:
    """Set attributes of a class, such as the number of processes, within the steps of a client.

    Args:
        owner: The class, for example of a trainer.
        **values: The attributes by name, as in a run of one process.
    """
    _HIDDEN.extend((owner, name, value) for name, value in values.items())


def one_process() -> AbstractContextManager[None]:
    """Return a context that hides the other processes of a run.

    They hold other clients, and take other steps.

    Within the context, ``self.all_gather``, the strategy's ``reduce``, ``broadcast`` and
    ``barrier``, ``sync_dist`` and the metrics of torchmetrics act as in a run of one process. So do
    ``self.trainer.world_size``, ``num_devices``, ``is_global_zero`` and the ranks.
    A direct call of a collective of ``torch.distributed`` raises its error about a missing
    process group.

    ``rank_zero_only`` still speaks of the real rank. Lightning's loggers decide by it too: with
    rank 0 in each process, ``self.logger.experiment`` would open a second W&B run or file.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return _NOTHING_TO_HIDE  # shared, because each local step enters it
    return _hide_processes()


@contextmanager
def _hide_processes() -> Iterator[None]:
    """Let ``torch.distributed`` and the trainer speak of one process."""
    before = [(owner, name, vars(owner).get(name, _MISSING)) for owner, name, _ in _HIDDEN]
    try:
        for owner, name, value in _HIDDEN:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
