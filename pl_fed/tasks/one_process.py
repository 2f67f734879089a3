"""A view of one process, for code that belongs to one client."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest import mock

import torch.distributed as dist

_NOTHING_TO_HIDE = nullcontext()


def one_process() -> AbstractContextManager[None]:
    """Return a context that hides the other processes of a run.

    They hold other clients, and take other steps.

    Within the context, ``self.all_gather``, the strategy's ``reduce``, ``broadcast`` and
    ``barrier``, ``sync_dist`` and the metrics of torchmetrics act as in a run of one process.
    A direct call of a collective of ``torch.distributed`` raises its error about a missing
    process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return _NOTHING_TO_HIDE  # shared, because each local step enters it
    return _hide_processes()


@contextmanager
def _hide_processes() -> Iterator[None]:
    """Let ``torch.distributed`` say that there is no process group."""
    hidden = mock.patch.object(dist, "is_initialized", _is_not_initialized)
    with hidden, mock.patch.object(dist.distributed_c10d, "is_initialized", _is_not_initialized):
        yield


def _is_not_initialized() -> bool:
    return False
