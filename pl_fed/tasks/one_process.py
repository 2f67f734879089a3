"""A view of one process, for code that belongs to one client."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist


@contextmanager
def one_process() -> Iterator[None]:
    """Hide the other processes of a run: they hold other clients, and take other steps.

    Within the context, ``self.all_gather``, the strategy's ``reduce``, ``broadcast`` and
    ``barrier``, ``sync_dist`` and the metrics of torchmetrics act as in a run of one process.
    A direct call of a collective of ``torch.distributed`` raises its error about a missing
    process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    hidden = mock.patch.object(dist, "is_initialized", _is_not_initialized)
    with hidden, mock.patch.object(dist.distributed_c10d, "is_initialized", _is_not_initialized):
        yield


def _is_not_initialized() -> bool:
    return False
