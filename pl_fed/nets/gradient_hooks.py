"""Hooks that a user registers on the gradients of parameters and on the steps of optimizers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def list_gradient_hooks(parameter: Tensor) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return the hooks on a gradient and those after its accumulation, by their handles' ids."""
    return parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]


def have_gradient_hooks(parameters: Iterable[Tensor]) -> bool:
    """Return whether any of some parameters has a hook on its gradient.

    Only a backward pass to the parameter itself calls the hook, and no pass to other tensors in its
    place, as in a stack.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> handle = layer.weight.register_hook(lambda gradient: 2 * gradient)
        >>> have_gradient_hooks([layer.weight]), have_gradient_hooks([layer.bias])
        (True, False)
    """
    return any(any(list_gradient_hooks(parameter)) for parameter in parameters)


def copy_gradient_hooks(source: nn.Module, copy: nn.Module) -> None:
    """Register the hooks of a module's parameters on those of its copy; torch leaves them out.

    Args:
        source: The module.
        copy: A copy of it; parameters that both share keep their hooks.
    """
    for parameter, copied in zip(source.parameters(), copy.parameters(), strict=True):
        if copied is parameter:
            continue
        on_gradient, after_accumulation = list_gradient_hooks(parameter)
        for hook in on_gradient.values():
            copied.register_hook(hook)
        for hook in after_accumulation.values():
            copied.register_post_accumulate_grad_hook(hook)


def list_step_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[Any]]:
    """Return the hooks before and those after an optimizer's steps.

    An optimizer that wraps another one need not have any.

    Example:
        >>> optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
        >>> handle = optimizer.register_step_post_hook(print)
        >>> list_step_hooks(optimizer)
        ([], [<built-in function print>])
    """
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    before, after = (getattr(optimizer, name, {}) for name in names)
    return [*before.values()], [*after.values()]
