"""Dropout whose draws are keyed, so that they are the same in every engine, chunk and process."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from pl_fed.random import uniforms
from pl_fed.torch_internals import is_in_backward

_STRETCH = 1 << 36  # each layer, each time it is called, draws from numbers of its own
_LAYERS = 1 << 10
_CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class Draws:
    """The key under which the layers of a model draw; set anew for each client and step.

    Attributes:
        key: A 64-bit key, or under ``torch.vmap`` one per client.
        wanted: Whether any layer draws.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.start(0)

    def start(self, key: Tensor | int) -> None:
        """Begin a step."""
        self.key = key
        self._calls: dict[nn.Module, int] = {}

    def call(self, layer: nn.Module) -> int:
        """Return how often a layer has drawn in this step, and count it.

        Within a backward pass, activation checkpointing asks for what was drawn before.

        Raises:
            ValueError: If it does of a layer that has drawn several times: which of them is not
                known.
        """
        calls = self._calls.get(layer, 0)
        if calls and is_in_backward():
            if calls > 1:
                raise ValueError(
                    "Expected each dropout layer of a net with activation checkpointing to be"
                    f" called once a step but got one that is called {calls} times: give each"
                    " place a layer of its own."
                )
            return 0
        self._calls[layer] = calls + 1
        return calls


class KeyedDropout(nn.Module):
    """``nn.Dropout`` with keyed draws (also of whole channels, as ``nn.Dropout2d`` and its kin).

    Args:
        p: Probability of dropping, in [0, 1].
        layer: Which of the model's dropout layers this is, from 0.
        draws: Where the key is.
        channelwise: Whether whole channels [batch, channel] are dropped.

    Attributes:
        stands_for: The layer of torch whose place it takes.
    """

    def __init__(self, p: float, layer: int, draws: Draws, channelwise: bool = False) -> None:
        super().__init__()
        self.stands_for: type[nn.Module] = nn.Dropout2d if channelwise else nn.Dropout
        self.p = p
        self.layer = layer
        self.draws = draws
        self.channelwise = channelwise

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of ``x`` [batch, ...] in training, and scale up the rest."""
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if self.channelwise else x.shape
        begin = (self.draws.call(self) * _LAYERS + self.layer) * _STRETCH
        # ^ 0 keeps a compiler from multiplying an index by 64-bit constants, which overflows
        counters = (torch.arange(shape.numel(), device=x.device) ^ 0).view(shape)
        keep = uniforms(self.draws.key, counters + begin) >= self.p
        return x * (keep.to(x.dtype) / (1 - self.p))

    def extra_repr(self) -> str:
        """Show the probability."""
        return f"p={self.p}"


def key_dropouts(module: nn.Module, draws: Draws) -> None:
    """Exchange every dropout layer of a model for a keyed one, in place.

    A layer that is used in several places stays one layer, and draws anew in each. Layers that draw
    in another way (``AlphaDropout``, calls of ``F.dropout``) are left alone; they follow torch's
    global generator, which the engine seeds per client.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        >>> key_dropouts(net, Draws())
        >>> net[1]
        KeyedDropout(p=0.5)
    """
    kinds = (KeyedDropout, nn.Dropout, *_CHANNELWISE)
    found = _exchange(module, kinds, lambda child, number: _keyed(child, number, draws))
    draws.wanted = draws.wanted or found > 0


def unkey_dropouts(module: nn.Module) -> None:
    """Exchange every keyed dropout layer of a model for torch's own, in place.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout2d(0.5))
        >>> key_dropouts(net, Draws())
        >>> unkey_dropouts(net)
        >>> net[1]
        Dropout2d(p=0.5, inplace=False)
    """
    _exchange(module, (KeyedDropout,), lambda child, _: _unkeyed(cast(KeyedDropout, child)))


def _exchange(
    module: nn.Module,
    kinds: tuple[type[nn.Module], ...],
    make: Callable[[nn.Module, int], nn.Module],
) -> int:
    """Exchange submodules of some types, given with their numbers, and return how many."""
    made: dict[nn.Module, nn.Module] = {}
    for owner in list(module.modules()):
        for name, child in list(owner._modules.items()):  # named_children skips repeats
            if child is None or type(child) not in kinds:
                continue
            if child not in made:
                made[child] = make(child, len(made))
            setattr(owner, name, made[child])
    return len(made)


def _keyed(child: nn.Module, layer: int, draws: Draws) -> KeyedDropout:
    if isinstance(child, KeyedDropout):
        child.layer, child.draws = layer, draws
        return child
    keyed = KeyedDropout(cast(float, child.p), layer, draws, isinstance(child, _CHANNELWISE))
    keyed.stands_for = type(child)
    return keyed.train(child.training)


def _unkeyed(child: KeyedDropout) -> nn.Module:
    return child.stands_for(child.p).train(child.training)
