"""Calls of a module as a function of its tensors."""

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

    It extends ``torch.func.functional_call``. Tied tensors stay tied. The call leaves the module
    unchanged even if a layer has several names, where PyTorch's own function does not
    (pytorch/pytorch#164759).

    Args:
        module: The module to call.
        tensors: Tensors by name. The module's own tensors remain for all other names. One of the
            names of a tied tensor is enough.
        args: The arguments of the call.
        kwargs: The keyword arguments of the call.

    Raises:
        RuntimeError: If the call replaces one of the given tensors by another: its value would be
            lost.
        ValueError: If the module has no tensor of a name.

    Example:
        >>> net = nn.Linear(1, 1)
        >>> functional_call(net, {"weight": torch.ones(1, 1)}, (torch.ones(2, 1),)) - net.bias
        tensor([[1.],
                [1.]], grad_fn=<SubBackward0>)
    """
    own_tensors: dict[str, Tensor] = {}
    locations: dict[Tensor, dict[tuple[nn.Module, str], str]] = defaultdict(dict)
    for prefix, part in module.named_modules(remove_duplicate=False):
        for key, tensor in chain(
            part.named_parameters(recurse=False, remove_duplicate=False),
            part.named_buffers(recurse=False, remove_duplicate=False),
        ):
            name = f"{prefix}.{key}" if prefix else key
            own_tensors[name] = tensor
            locations[tensor][part, key] = name
    if unknown := [name for name in tensors if name not in own_tensors]:
        raise ValueError(
            f"Expected argument `tensors` to name some of {', '.join(own_tensors)}, but got"
            f" {', '.join(unknown)}."
        )
    replacements = {
        location: tensor
        for name, tensor in tensors.items()
        for location in locations[own_tensors[name]].values()
    }
    keywords, arguments = dict(kwargs or {}), dict(replacements)
    result = torch.func.functional_call(module, replacements, args, keywords, tie_weights=False)
    for name, tensor in arguments.items():  # torch has written the module's last tensors back
        if replacements[name] is not tensor:
            raise RuntimeError(f"the module replaces the tensor {name} in place of changing it")
    return result


class Net:
    """A module that is called with other parameters and buffers in place of its own.

    Args:
        module: The module.
        tensors: Tensors by name. The module's own tensors remain for all other names.
    """

    def __init__(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self.module = module
        self.tensors = tensors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module: see :func:`functional_call`."""
        return functional_call(self.module, self.tensors, args, kwargs)
