"""Training mode, evaluation mode, and full precision inside mixed precision."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that turns off autocast on a device."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


@contextmanager
def evaluation_mode(net: nn.Module) -> Iterator[None]:
    """Set evaluation mode within the context; afterwards restore the mode of each module."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
