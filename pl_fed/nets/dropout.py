"""Keyed dropout: its draws are equal in every engine, chunk and process."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from pl_fed.random import uniforms
from pl_fed.torch_internals import is_in_backward

_CALL_NUMBERS = 1 << 36  # numbers reserved for one call of one layer
_MAX_LAYERS = 1 << 10
_CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class Draws:
    """The random key of the dropout layers of a model, which changes with every client and step.

    Attributes:
        key: A 64-bit key, or under ``torch.vmap`` one key for each client.
        wanted: Whether any layer draws.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.start(0)

    def start(self, key: Tensor | int) -> None:
        """Start a step with a key."""
        self.key = key
        self._calls: dict[nn.Module, int] = {}

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
    """Keyed dropout: ``nn.Dropout`` with keyed draws, also of channels as in ``nn.Dropout2d``.

    Args:
        p: Probability of dropping an element, in [0, 1].
        layer: The number of this layer among the model's dropout layers, from 0.
        draws: The object with the key.
        channelwise: Whether complete channels [batch, channel] are dropped.

    Attributes:
        stands_for: The class of the torch layer that this layer replaces.
    """

    def __init__(self, p: float, layer: int, draws: Draws, channelwise: bool = False) -> None:
        super().__init__()
        self.stands_for: type[nn.Module] = nn.Dropout2d if channelwise else nn.Dropout
        self.p = p
        self.layer = layer
        self.draws = draws
        self.channelwise = channelwise

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of ``x`` [batch, ...] in training, and scale the others by 1 / (1 − p)."""
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if self.channelwise else x.shape
        begin = (self.draws.call(self) * _MAX_LAYERS + self.layer) * _CALL_NUMBERS
        # ^ 0 stops a compiler from multiplying an index by 64-bit constants, which overflows
        counters = (torch.arange(shape.numel(), device=x.device) ^ 0).view(shape)
        keep = uniforms(self.draws.key, counters + begin) >= self.p
        return x * (keep.to(x.dtype) / (1 - self.p))

    def extra_repr(self) -> str:
        """Show the probability."""
        return f"p={self.p}"


def key_dropouts(module: nn.Module, draws: Draws) -> None:
    """Replace every dropout layer of a model by a keyed one, in place.

    A layer with several places in the model stays one layer, and draws separately in each place.
    Other sources of randomness (``AlphaDropout``, calls of ``F.dropout``) stay as they are. They
    use torch's global generator, which the engine seeds for each client.

    Args:
        module: The model.
        draws: The object with the key of the draws.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        >>> key_dropouts(net, Draws())
        >>> net[1]
        KeyedDropout(p=0.5)
    """
    kinds = (KeyedDropout, nn.Dropout, *_CHANNELWISE)
    num_layers = _replace_layers(
        module, kinds, lambda layer, number: _build_keyed_layer(layer, number, draws)
    )
    draws.wanted = draws.wanted or num_layers > 0


def unkey_dropouts(module: nn.Module) -> None:
    """Replace every keyed dropout layer of a model by torch's own layer, in place.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout2d(0.5))
        >>> key_dropouts(net, Draws())
        >>> unkey_dropouts(net)
        >>> net[1]
        Dropout2d(p=0.5, inplace=False)
    """
    _replace_layers(
        module, (KeyedDropout,), lambda layer, _: _build_torch_layer(cast(KeyedDropout, layer))
    )


def _replace_layers(
    module: nn.Module,
    kinds: tuple[type[nn.Module], ...],
    build: Callable[[nn.Module, int], nn.Module],
) -> int:
    """Replace the submodules of some types, and return their number.

    Args:
        module: The model.
        kinds: The types.
        build: Returns the replacement of a submodule, given its number among these submodules.
    """
    replacements: dict[nn.Module, nn.Module] = {}
    for owner in list(module.modules()):
        for name, child in list(owner._modules.items()):  # named_children skips repeats
            if child is None or type(child) not in kinds:
                continue
            if child not in replacements:
                replacements[child] = build(child, len(replacements))
            setattr(owner, name, replacements[child])
    return len(replacements)


def _build_keyed_layer(layer: nn.Module, number: int, draws: Draws) -> KeyedDropout:
    if isinstance(layer, KeyedDropout):
        layer.layer, layer.draws = number, draws
        return layer
    keyed = KeyedDropout(cast(float, layer.p), number, draws, isinstance(layer, _CHANNELWISE))
    keyed.stands_for = type(layer)
    return keyed.train(layer.training)


def _build_torch_layer(layer: KeyedDropout) -> nn.Module:
    return layer.stands_for(layer.p).train(layer.training)
