"""Images in compiled steps on the CPU: channels last, and pooled by torch's own kernels.

The compiler hands convolutions to oneDNN with channels last, whatever the net says: what comes
before and after them is copied to and fro, and maxima over windows are scalar code. With all of it
traced with channels last, a round of Ditto's CNN takes 0.76 of the time
(``experiments/benchmarks/channels_last.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_LIBRARY = torch.library.Library("pl_fed", "FRAGMENT")
_POOLING = {
    "max_pool2d": _aten.max_pool2d_with_indices.default,
    "max_pool2d_backward": _aten.max_pool2d_with_indices_backward.default,
}
for _name, _own in _POOLING.items():  # by another name, so that the compiler leaves it as it is
    _, _arguments = str(_own._schema).split("(", 1)
    _LIBRARY.define(f"{_name}({_arguments}")
    for _key in ("CPU", "Meta"):
        _LIBRARY.impl(_name, _own, _key)


class ChannelsLast(TorchDispatchMode):
    """Has images on the CPU, within it, convolved and pooled with channels last.

    Convolutions only where oneDNN runs them: of float32 and bfloat16. A ``view`` of an image is a
    copy where it could not be one any more.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _aten.convolution.default and _by_onednn(args[0]):
            args = (_channels_last(args[0]), *args[1:])
        elif func is _aten.max_pool2d_with_indices.default and _is_image(args[0]):
            func, args = torch.ops.pl_fed.max_pool2d, (_channels_last(args[0]), *args[1:])
        elif func is _aten.max_pool2d_with_indices_backward.default and _is_image(args[1]):
            func = torch.ops.pl_fed.max_pool2d_backward
            gradient, x, *rest = args
            args = (_channels_last(gradient), _channels_last(x), *rest)
        elif func is _aten.view.default and _is_image(args[0]) and _is_turned(args[0]):
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **(kwargs or {}))


def _channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


def _is_image(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dim() == 4


def _is_turned(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _by_onednn(x: Tensor) -> bool:
    known = torch.backends.mkldnn.is_available() and x.dtype in (torch.float32, torch.bfloat16)
    return known and _is_image(x)
