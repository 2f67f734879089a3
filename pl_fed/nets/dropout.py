"""Keyed dropout: its draws are equal in every engine, chunk and process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from pl_fed.random import uniforms
from pl_fed.torch_internals import is_in_backward

_CALL_NUMBERS = 1 << 36  # numbers reserved for one call of one layer
_MAX_LAYERS = 1 << 10


class Draws:
    """The random key of the dropout layers of a model, which changes with every client and step.

    Attributes:
        key: A 64-bit key, or under ``torch.vmap`` one key for each client; ``None`` in an
            evaluation.
        wanted: Whether any layer draws.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.start(0)

    def start(self, key: Tensor | int) -> None:
        """Start a step with a key."""
        self.key: Tensor | int | None = key
        self._calls: dict[nn.Module, int] = {}

    @contextmanager
    def without_key(self) -> Iterator[None]:
        """Let layers draw from torch's own generator, as an evaluation in training mode does."""
        before = self.key, self._calls
        self.key = None
        try:
            yield
        finally:
            self.key, self._calls = before

    def call(self, layer: nn.Module) -> int:
        """Return the number of a layer's earlier draws in this step, and count this one.

        Within a backward pass, activation checkpointing repeats the layer's draw, whose number is
        0.

        Raises:
            ValueError: If activation checkpointing repeats a draw of a layer with several draws,
                because the draw to repeat is unknown.
        """
        calls = self._calls.get(layer, 0)
        if calls and is_in_backward():
            if calls > 1:
                raise ValueError(
                    "Expected each dropout layer of a net with activation checkpointing to be"
                    f" called once a step but got one that is called {calls} times: use a separate"
                    " layer for each call."
                )
            return 0
        self._calls[layer] = calls + 1
        return calls


class KeyedDropout(nn.Module):
    """Keyed dropout: the part of a dropout layer of torch that draws by a key in local steps.

    Such a layer stays an instance of its class of torch, for code that looks for dropout layers, as
    that of Monte Carlo dropout does. Without a key it is torch's layer.

    Attributes:
        layer: The number of this layer among the model's dropout layers, from 0.
        draws: The object with the key.
        stands_for: The class of torch.
        channelwise: Whether complete channels [batch, channel] are dropped.
    """

    p: float
    layer: int
    draws: Draws
    stands_for: type[nn.Module]
    channelwise = True

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of ``x`` [batch, ...] in training, and scale the others by 1 / (1 − p)."""
        if not self.training or self.p == 0:
            return x
        if self.draws.key is None:
            outputs: Tensor = super().forward(x)
            return outputs
        if self.p == 1:
            return x * 0
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if self.channelwise else x.shape
        begin = (self.draws.call(self) * _MAX_LAYERS + self.layer) * _CALL_NUMBERS
        # ^ 0 stops a compiler from multiplying an index by 64-bit constants, which overflows
        counters = (torch.arange(shape.numel(), device=x.device) ^ 0).view(shape)
        keep = uniforms(self.draws.key, counters + begin) >= self.p
        return x * (keep.to(x.dtype) / (1 - self.p))


class DropoutByKey(KeyedDropout, nn.Dropout):
    """Dropout by key: ``nn.Dropout`` with keyed draws."""

    stands_for = nn.Dropout
    channelwise = False


class Dropout1dByKey(KeyedDropout, nn.Dropout1d):
    """Dropout of channels by key: ``nn.Dropout1d`` with keyed draws."""

    stands_for = nn.Dropout1d


class Dropout2dByKey(KeyedDropout, nn.Dropout2d):
    """Dropout of channels by key: ``nn.Dropout2d`` with keyed draws."""

    stands_for = nn.Dropout2d


class Dropout3dByKey(KeyedDropout, nn.Dropout3d):
    """Dropout of channels by key: ``nn.Dropout3d`` with keyed draws."""

    stands_for = nn.Dropout3d


_KEYED_KINDS: dict[type[nn.Module], type[KeyedDropout]] = {
    kind.stands_for: kind for kind in (DropoutByKey, Dropout1dByKey, Dropout2dByKey, Dropout3dByKey)
}


def key_dropouts(module: nn.Module, draws: Draws) -> None:
    """Make every dropout layer of a model a keyed one, in place.

    A layer with several places in the model stays one layer, and draws separately in each place. It
    also stays the same object, so that a list of the user's, or a hook on it, still has it.
    Other sources of randomness (``AlphaDropout``, calls of ``F.dropout``) stay as they are. They
    use torch's global generator, which the engine seeds for each client.

    Args:
        module: The model.
        draws: The object with the key of the draws.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        >>> key_dropouts(net, Draws())
        >>> net[1]
        DropoutByKey(p=0.5, inplace=False)
    """
    layers = _list_dropouts(module)
    for number, layer in enumerate(layers):
        if not isinstance(layer, KeyedDropout):
            layer.__class__ = cast(Any, _KEYED_KINDS[type(layer)])
        keyed = cast(KeyedDropout, layer)
        keyed.layer, keyed.draws = number, draws
    draws.wanted = draws.wanted or bool(layers)


def unkey_dropouts(module: nn.Module) -> None:
    """Make every keyed dropout layer of a model torch's own again, in place.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout2d(0.5))
        >>> key_dropouts(net, Draws())
        >>> unkey_dropouts(net)
        >>> net[1]
        Dropout2d(p=0.5, inplace=False)
    """
    for layer in _list_dropouts(module):
        if isinstance(layer, KeyedDropout):
            del layer.layer, layer.draws
            layer.__class__ = cast(Any, layer.stands_for)


def _list_dropouts(module: nn.Module) -> list[nn.Module]:
    """Return the dropout layers within a model, in the order of their numbers."""
    kinds = (*_KEYED_KINDS, *_KEYED_KINDS.values())
    children = (child for owner in module.modules() for child in owner._modules.values())
    layers = (child for child in children if child is not None and type(child) in kinds)
    return [*dict.fromkeys(layers)]
