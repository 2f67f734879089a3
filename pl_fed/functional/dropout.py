"""Dropout whose draws are keyed, so that they are the same in every engine, chunk and process."""

from typing import cast

import torch
from torch import Tensor, nn

from pl_fed.functional.random import uniforms

_SALT_STEP = 1 << 40  # layers draw from stretches of the key's numbers that never meet
_CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class Draws:
    """The key under which the layers of a model draw; set anew for each client and step.

    Attributes:
        key: A 64-bit key, or under ``torch.vmap`` one per client.
    """

    def __init__(self) -> None:
        self.key: Tensor | int = 0


class KeyedDropout(nn.Module):
    """``nn.Dropout`` with keyed draws (also of whole channels, as ``nn.Dropout2d`` and its kin).

    Args:
        p: Probability of dropping, in [0, 1).
        layer: Which of the model's dropout layers this is, from 0.
        draws: Where the key is.
        channelwise: Whether whole channels [batch, channel] are dropped.
    """

    def __init__(self, p: float, layer: int, draws: Draws, channelwise: bool = False) -> None:
        super().__init__()
        self.p = p
        self.layer = layer
        self.draws = draws
        self.channelwise = channelwise

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of ``x`` [batch, ...] in training, and scale up the rest."""
        if not self.training or self.p == 0:
            return x
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if self.channelwise else x.shape
        counters = torch.arange(shape.numel(), device=x.device).view(shape)
        keep = uniforms(self.draws.key, counters + self.layer * _SALT_STEP) >= self.p
        return x * (keep.to(x.dtype) / (1 - self.p))

    def extra_repr(self) -> str:
        """Show the probability."""
        return f"p={self.p}"


def key_dropouts(module: nn.Module, draws: Draws) -> None:
    """Exchange every dropout layer of a model for a keyed one, in place.

    Layers that draw in another way (``AlphaDropout``, calls of ``F.dropout``) are left alone; they
    follow torch's global generator, which the engine seeds per client.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        >>> key_dropouts(net, Draws())
        >>> net[1]
        KeyedDropout(p=0.5)
    """
    layers = 0
    for owner in list(module.modules()):
        for name, child in owner.named_children():
            if isinstance(child, KeyedDropout):
                child.draws = draws
            elif type(child) is nn.Dropout or type(child) in _CHANNELWISE:
                keyed = KeyedDropout(
                    cast(float, child.p), layers, draws, type(child) in _CHANNELWISE
                )
                setattr(owner, name, keyed.train(child.training))
                layers += 1
