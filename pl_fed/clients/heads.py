"""The head of a net: the module that turns features into outputs, by default the last one."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from pl_fed.nets.rows import trainable_parameters
from pl_fed.trees import describe


def list_modules(names: Iterable[str]) -> list[str]:
    """Return the modules of parameters, in order, from the parameters' names.

    A parametrized weight, as by ``weight_norm``, belongs to its layer.

    Example:
        >>> list_modules(["0.weight", "2.bias", "2.parametrizations.weight.original0"])
        ['0', '2']
    """
    plain = (re.sub(r"(^|\.)parametrizations\..*", r"\1", name) for name in names)
    return list(dict.fromkeys(name.rpartition(".")[0] for name in plain))


def find_head(names: Iterable[str], head: str | None = None) -> str:
    """Return the name of a net's head, checked.

    Args:
        names: The names of the net's trainable parameters.
        head: The name of the module; ``None`` for the last module with trainable parameters.

    Raises:
        ValueError: If the net has no module of this name with trainable parameters.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Identity())
        >>> find_head(dict(net.named_parameters()))
        '2'
    """
    modules = list_modules(names)
    if head is None:
        return modules[-1]
    if not any(f"{name}.".startswith(f"{head}.") for name in modules):
        raise ValueError(
            "Expected argument `head` to be a module with trainable parameters, such as"
            f" {', '.join(modules)}, but got {head!r}."
        )
    return head


def require_body(net: nn.Module, head: str) -> None:
    """Raise ``ValueError`` if a net has no trainable parameters outside of its head."""
    if not head or all(f"{name}.".startswith(f"{head}.") for name in trainable_parameters(net)):
        raise ValueError(
            f"Expected argument `net` to have a body to train below its head {head!r} but got"
            f" {type(net).__name__} without other trainable parameters: add a layer."
        )


def record_features(net: nn.Module, head: str, predict: Callable[[], Any]) -> Tensor:
    """Return the input of a net's head in a forward pass.

    Args:
        net: The net.
        head: The name of its head.
        predict: Runs the net, and returns its outputs.

    Raises:
        ValueError: If the head is not called once with one tensor, or the net's outputs are not
            those of the head.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
    hook = net.get_submodule(head).register_forward_hook(
        lambda _, args, kwargs, outputs: calls.append((args, kwargs, outputs)), with_kwargs=True
    )
    try:
        outputs = predict()
    finally:
        hook.remove()
    if len(calls) != 1:
        problem = f"{len(calls)} calls of it"
    else:
        (args, kwargs, head_outputs), *_ = calls
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            problem = f"{describe((*args, *kwargs.values()))} as its inputs"
        elif outputs is not head_outputs:
            problem = "other outputs than those of the head"
        else:
            return args[0]
    raise ValueError(
        f"Expected argument `net` to call its head {head!r} once, with one tensor of features, and"
        f" to return the head's outputs, but got {problem} in {type(net).__name__}: return the"
        " outputs of the last layer as they are."
    )


def require_linear_head(net: nn.Module, head: str) -> nn.Linear:
    """Return the head of a net, a trainable linear layer with a bias.

    Args:
        net: The net.
        head: The name of the head; empty if the net is its own head.

    Raises:
        TypeError: If the head is another module.
    """
    linear = net.get_submodule(head)
    prefix = f"{head}." if head else ""
    names = {f"{prefix}weight", f"{prefix}bias"}
    if not isinstance(linear, nn.Linear) or not names <= {*trainable_parameters(net)}:
        raise TypeError(
            "Expected argument `head` to be a trainable torch.nn.Linear with a bias but got"
            f" {linear} as {head!r}: name the last linear layer."
        )
    return linear
