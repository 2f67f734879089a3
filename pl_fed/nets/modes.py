"""Training mode, evaluation mode, and full precision inside mixed precision."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from pl_fed.nets.rows import frozen_modules

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""The layers that normalize by statistics over the samples of a batch."""


def mixes_samples(net: nn.Module) -> bool:
    """Return whether a net mixes the samples of a batch in evaluation mode, too.

    A norm without running statistics does.

    Example:
        >>> mixes_samples(nn.BatchNorm1d(2)), mixes_samples(
        ...     nn.BatchNorm1d(2, track_running_stats=False)
        ... )
        (False, True)
    """
    layers = (layer for layer in net.modules() if isinstance(layer, BATCH_NORMS))
    return any(layer.running_mean is None for layer in layers)


def list_shortened_weights(net: nn.Module) -> set[str]:
    """Return the names of embeddings with ``max_norm``.

    Their forward pass shortens long vectors in place, in evaluation mode, too.

    Example:
        >>> sorted(list_shortened_weights(nn.Sequential(nn.Embedding(3, 2, max_norm=1.0))))
        ['0.weight']
    """
    return {
        f"{name}.weight" if name else "weight"
        for name, layer in net.named_modules()
        if getattr(layer, "max_norm", None) is not None
    }


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


@contextmanager
def training_mode(net: nn.Module) -> Iterator[None]:
    """Set training mode within the context; afterwards restore each module's mode, and buffers.

    Entirely frozen submodules stay in evaluation mode.
    """
    modes = [(module, module.training) for module in net.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
    net.train()
    for frozen in frozen_modules(net):
        frozen.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for buffer, value in buffers:
            if buffer.shape != value.shape:
                buffer.resize_(value.shape)
            buffer.copy_(value)
