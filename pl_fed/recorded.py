"""Objects that remember with which arguments they were made, in the words of a config."""

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

_LONGEST_TEXT = 200  # letters that describe a net
_MOST_ITEMS = 1000  # of a list; data may be given as longer ones
_BUILDS_OPTIMIZER = ("optimizer", "server_optimizer")


class Configurable:
    """Base of the classes that a config names: each object has a description of its arguments.

    Attributes:
        constructor_arguments: What each argument was, in plain values, with the class's defaults.

    Example:
        >>> class Krum(Recorded):
        ...     def __init__(self, selected=1, center=None):
        ...         pass
        >>> Krum(3).constructor_arguments
        {'selected': 3, 'center': None}
    """

    constructor_arguments: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Describe the arguments before the object is made of them."""
        if cls.__init__ is object.__init__ and (args or kwargs):  # else Python would not say so
            raise TypeError(f"{cls.__name__}() takes no arguments")
        made = super().__new__(cls)
        arguments = _arguments_of(cls, args, kwargs)
        object.__setattr__(made, "constructor_arguments", arguments)
        return made


def class_record(value: Any) -> dict[str, Any]:
    """Return an object's class and arguments, as a config has them."""
    arguments = value.constructor_arguments if isinstance(value, Configurable) else {}
    if isinstance(value, nn.Module) and not isinstance(value, Configurable):
        arguments = _module_arguments(value)
    path = {"class_path": class_path(type(value))}
    return {**path, "init_args": arguments} if arguments else path


def class_path(kind: Any) -> str:
    """Return the shortest path that leads to a class or function.

    Example:
        >>> class_path(torch.optim.SGD)
        'torch.optim.SGD'
    """
    module, name = getattr(kind, "__module__", ""), getattr(kind, "__qualname__", str(kind))
    parts = module.split(".")
    for length in range(1, len(parts)):
        package = ".".join(parts[:length])
        if getattr(sys.modules.get(package), name, None) is kind:
            return f"{package}.{name}"
    return f"{module}.{name}"


def _arguments_of(cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs)  # type: ignore[misc]
    except (TypeError, ValueError):
        return {}  # what is wrong with them is said when the object is made
    bound.apply_defaults()
    return dict(_described(bound))


def _described(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any]]:
    for place, (name, value) in enumerate(bound.arguments.items()):
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            yield from ((each, _safely_plain(each, own)) for each, own in value.items())
        elif place and not (kind is inspect.Parameter.VAR_POSITIONAL and not value):
            yield name, _safely_plain(name, value)


def _safely_plain(name: str, value: Any) -> Any:
    try:
        return plain(name, value)
    except Exception:  # an object of the user's may refuse to be described
        return {"class_path": class_path(type(value))}


def plain(name: str, value: Any) -> Any:
    """Return an argument's value as YAML may hold it; of an object its class and arguments."""
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)  # YAML does not know a class derived from it
    if isinstance(value, Mapping):
        return {str(key): plain(str(key), each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | range):
        long = len(value) > _MOST_ITEMS
        return _summary(value) if long else [plain(name, each) for each in value]
    if isinstance(value, Tensor | np.ndarray | PurePath | torch.dtype | torch.device):
        return _summary(value)
    if callable(value):
        return _callable_record(name, value)
    return _section(value) if _is_section(value) else class_record(value)


def _is_section(value: Any) -> bool:
    """Whether a value is a section of a config: a dataclass, which needs no class path."""
    return is_dataclass(value) and not isinstance(value, Configurable | nn.Module)


def _section(section: Any) -> dict[str, Any]:
    return {
        entry.name: plain(entry.name, getattr(section, entry.name)) for entry in fields(section)
    }


def _summary(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} {list(value.shape)}"
    if isinstance(value, list | tuple | set | range):
        return f"{type(value).__name__} of {len(value)}"
    return str(value)


def _callable_record(name: str, value: Any) -> Any:
    """Return what there is to say of a function, a class, a partial, or a module."""
    if name in _BUILDS_OPTIMIZER and (built := _optimizer_record(value)):
        return built
    if isinstance(value, functools.partial):
        own = {key: plain(key, each) for key, each in value.keywords.items()}
        return {"class_path": class_path(value.func), "init_args": own}
    return class_path(value) if hasattr(value, "__qualname__") else class_record(value)


def _optimizer_record(build: Callable[..., Any]) -> dict[str, Any]:
    """Return the class and settings of the optimizer that a function builds; nothing if it fails.

    Nothing else tells apart two functions without names.
    """
    try:
        optimizer = build([nn.Parameter(torch.zeros(1))])
        settings = {
            name: value
            for name, value in optimizer.defaults.items()
            if isinstance(value, bool | int | float | str)
        }
        return {"class_path": class_path(type(optimizer)), "init_args": settings}
    except Exception:  # which is refused elsewhere
        return {}


def _module_arguments(module: nn.Module) -> dict[str, Any]:
    """Return what there is to say of a module that does not remember its arguments."""
    if not any(module.children()):
        plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str)}
        return {k: v for k, v in plain.items() if k != "training" and not k.startswith("_")}
    leaves = [each for each in module.modules() if not any(each.children())]
    text = ", ".join(f"{type(each).__name__}({each.extra_repr()})" for each in leaves)
    numbers = sum(parameter.numel() for parameter in module.parameters())
    if len(text) > _LONGEST_TEXT:  # nets that differ further on are others
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        text = f"{text[:_LONGEST_TEXT]}… {digest[:8]}"
    return {"parameters": numbers, "layers": text}
