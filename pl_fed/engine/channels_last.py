"""Images in compiled steps on the CPU: channels last, and pooled by torch's own kernels.

The compiler hands convolutions to oneDNN with channels last, whatever the net's own layout: their
inputs and outputs are copied to and fro, and maxima over windows are scalar code. Traced with
channels last throughout, a round of Ditto's CNN is 1.3 times as fast
(``experiments/benchmarks/channels_last.py``).
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from pl_fed.torch_internals import OperatorMode, signature_of

_aten = torch.ops.aten
_LIBRARY = torch.library.Library("pl_fed", "FRAGMENT")
_POOLING = {
    "max_pool2d": _aten.max_pool2d_with_indices.default,
    "max_pool2d_backward": _aten.max_pool2d_with_indices_backward.default,
}


@cache
def _define_pooling() -> None:
    """Give torch's pooling another name, under which the compiler leaves it as it is."""
    for name, own in _POOLING.items():
        _LIBRARY.define(f"{name}{signature_of(own)}")
        for key in ("CPU", "Meta"):
            _LIBRARY.impl(name, own, key)


class ChannelsLast(OperatorMode):
    """Convolves and pools images on the CPU with channels last.

    Convolutions only where oneDNN runs them: of float32 and bfloat16. A ``view`` of an image that
    no longer lies in its own order is a copy.
    """

    def __enter__(self) -> Self:
        _define_pooling()
        return super().__enter__()

    def run(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator on images with channels last."""
        if operator is _aten.convolution.default and _by_onednn(args[0]):
            args = (_channels_last(args[0]), *args[1:])
        elif operator is _aten.max_pool2d_with_indices.default and _is_image(args[0]):
            operator, args = torch.ops.pl_fed.max_pool2d, (_channels_last(args[0]), *args[1:])
        elif operator is _aten.max_pool2d_with_indices_backward.default and _is_image(args[1]):
            operator = torch.ops.pl_fed.max_pool2d_backward
            gradient, x, *others = args
            args = (_channels_last(gradient), _channels_last(x), *others)
        elif operator is _aten.view.default and _is_image(args[0]) and _is_turned(args[0]):
            args = (args[0].contiguous(), *args[1:])
        return operator(*args, **kwargs)


def _channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


def _is_image(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dim() == 4


def _is_turned(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _by_onednn(x: Tensor) -> bool:
    takes_dtype = x.dtype in (torch.float32, torch.bfloat16)
    return torch.backends.mkldnn.is_available() and takes_dtype and _is_image(x)
