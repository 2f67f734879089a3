"""A module as a function of its tensors."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn


def functional_call(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Call a module with other parameters and buffers in place of its own.

    It is ``torch.func.functional_call`` with tied tensors kept tied, and leaves a module as it was
    also where a layer is known by several names: PyTorch's own does not (pytorch/pytorch#164759).

    Args:
        module: What is called.
        tensors: By name; what is not named stays the module's own. Of tied ones, one is enough.
        args: What it is called with.
        kwargs: What it is called with by name.

    Raises:
        ValueError: If the module has no tensor of a name.

    Example:
        >>> net = nn.Linear(1, 1)
        >>> functional_call(net, {"weight": torch.ones(1, 1)}, (torch.ones(2, 1),)) - net.bias
        tensor([[1.],
                [1.]], grad_fn=<SubBackward0>)
    """
    tensor_of: dict[str, Tensor] = {}
    places: dict[Tensor, dict[tuple[nn.Module, str], str]] = defaultdict(dict)
    for prefix, part in module.named_modules(remove_duplicate=False):
        for key, tensor in chain(
            part.named_parameters(recurse=False, remove_duplicate=False),
            part.named_buffers(recurse=False, remove_duplicate=False),
        ):
            name = f"{prefix}.{key}" if prefix else key
            tensor_of[name] = tensor
            places[tensor][part, key] = name
    if unknown := [name for name in tensors if name not in tensor_of]:
        raise ValueError(
            f"Expected argument `tensors` to name some of {', '.join(tensor_of)}, but got"
            f" {', '.join(unknown)}."
        )
    once = {
        place: tensor
        for name, tensor in tensors.items()
        for place in places[tensor_of[name]].values()
    }
    return torch.func.functional_call(module, once, args, dict(kwargs or {}), tie_weights=False)


class Net:
    """A module with other parameters and buffers, to be called as the module.

    Args:
        module: The module.
        tensors: By name; what is not named stays the module's own.
    """

    def __init__(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self.module = module
        self.tensors = tensors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module: see :func:`functional_call`."""
        return functional_call(self.module, self.tensors, args, kwargs)
