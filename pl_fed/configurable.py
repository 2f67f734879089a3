"""Objects that record the arguments of their construction, in the form of a config."""

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

_MAX_LETTERS = 200  # in the description of a net
_MAX_ITEMS = 1000  # in a recorded list; longer lists contain data
_OPTIMIZER_ARGUMENTS = ("optimizer", "server_optimizer")

_read_signature = functools.lru_cache(512)(inspect.signature)  # takes longer than most constructors


class Configurable:
    """Base class of the classes in a config: every object records its constructor arguments.

    Attributes:
        constructor_arguments: The arguments by name as plain values, defaults included.

    Example:
        >>> class Krum(Configurable):
        ...     def __init__(self, selected=1, center=None):
        ...         pass
        >>> Krum(3).constructor_arguments
        {'selected': 3, 'center': None}
    """

    constructor_arguments: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Record the arguments before ``__init__`` runs."""
        if cls.__init__ is object.__init__ and (args or kwargs):  # Python checks it without __new__
            raise TypeError(f"{cls.__name__}() takes no arguments")
        instance = super().__new__(cls)
        arguments = _record_arguments(cls, args, kwargs)
        object.__setattr__(instance, "constructor_arguments", arguments)
        return instance


def class_record(value: Any) -> dict[str, Any]:
    """Return the class and the arguments of an object, in the form of a config."""
    arguments = value.constructor_arguments if isinstance(value, Configurable) else {}
    if isinstance(value, nn.Module) and not isinstance(value, Configurable):
        arguments = _record_module(value)
    path = {"class_path": class_path(type(value))}
    return {**path, "init_args": arguments} if arguments else path


def default_arguments(kind: Any) -> dict[str, Any]:
    """Return the default arguments of a class or function by name, as plain values.

    Example:
        >>> default_arguments(torch.optim.SGD)["momentum"]
        0
    """
    function = kind.__init__ if isinstance(kind, type) else kind  # type: ignore[misc]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return {}
    return {
        name: _record_value(name, parameter.default)
        for name, parameter in signature.parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


def add_defaults(saved: Any, current: Any, defaults: Mapping[str, Any]) -> Any:
    """Add the arguments that a saved record lacks, because an earlier version had fewer.

    An argument is added if it has its default in the current record.

    Args:
        saved: The saved record, or a part of it.
        current: The same part of the current record.
        defaults: The defaults of the arguments in this part.

    Example:
        >>> add_defaults({"lr": 0.1}, {"lr": 0.1, "momentum": 0, "fused": True}, {"momentum": 0})
        {'lr': 0.1, 'momentum': 0}
    """
    if isinstance(saved, list) and isinstance(current, list) and len(saved) == len(current):
        return [add_defaults(old, new, {}) for old, new in zip(saved, current)]
    if not isinstance(saved, dict) or not isinstance(current, dict):
        return saved
    if "class_path" in current:
        if saved.get("class_path") != current["class_path"]:
            return saved
        defaults = {"init_args": default_arguments(_find_class(current["class_path"]))}
        saved = {"init_args": {}, **saved}
    added = dict(saved)
    for name, value in current.items():
        default = defaults.get(name)
        if name in saved:
            inner = default if isinstance(default, Mapping) else {}
            added[name] = add_defaults(saved[name], value, inner)
        elif name in defaults and default == value:
            added[name] = value
    return added


def _find_class(path: str) -> Any:
    """Return an imported class or function by its path, or ``None``."""
    module, _, names = path.rpartition(".")
    while module and module not in sys.modules:
        module, _, name = module.rpartition(".")
        names = f"{name}.{names}"
    found: Any = sys.modules.get(module)
    for name in names.split("."):
        found = getattr(found, name, None)
    return found


def class_path(kind: Any) -> str:
    """Return the shortest dotted path to a class or function.

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


def _record_arguments(cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        bound = _read_signature(cls.__init__).bind(None, *args, **kwargs)  # type: ignore[misc]
    except (TypeError, ValueError):
        return {}  # `__init__` raises the error for wrong arguments
    bound.apply_defaults()
    return dict(_record_bound(bound))


def _record_bound(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any]]:
    for position, (name, value) in enumerate(bound.arguments.items()):
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            yield from ((keyword, _record_value(keyword, item)) for keyword, item in value.items())
        elif position and not (kind is inspect.Parameter.VAR_POSITIONAL and not value):
            yield name, _record_value(name, value)


def _record_value(name: str, value: Any) -> Any:
    try:
        return plain_value(name, value)
    except Exception:  # a user's object may raise on access
        return {"class_path": class_path(type(value))}


def plain_value(name: str, value: Any) -> Any:
    """Return a value as YAML can represent it; an object becomes its class and arguments.

    Args:
        name: The name of the argument.
        value: The value.
    """
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)  # YAML does not represent derived classes
    if isinstance(value, Mapping):
        return {str(key): plain_value(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | range):
        is_long = len(value) > _MAX_ITEMS
        return _summarize(value) if is_long else [plain_value(name, item) for item in value]
    if isinstance(value, Tensor | np.ndarray | PurePath | torch.dtype | torch.device):
        return _summarize(value)
    if callable(value):
        return _record_callable(name, value)
    return _record_section(value) if _is_section(value) else class_record(value)


def _is_section(value: Any) -> bool:
    """Return whether a value is a section of a config: a dataclass without a class path."""
    return is_dataclass(value) and not isinstance(value, Configurable | nn.Module)


def _record_section(section: Any) -> dict[str, Any]:
    return {
        entry.name: plain_value(entry.name, getattr(section, entry.name))
        for entry in fields(section)
    }


def _summarize(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} {list(value.shape)}"
    if isinstance(value, list | tuple | set | range):
        return f"{type(value).__name__} of {len(value)}"
    return str(value)


def _record_callable(name: str, value: Any) -> Any:
    """Return the record of a function, a class, a partial, or a module."""
    if name in _OPTIMIZER_ARGUMENTS and (optimizer := _record_optimizer(value)):
        return optimizer
    if isinstance(value, functools.partial):
        keywords = {key: plain_value(key, item) for key, item in value.keywords.items()}
        return {"class_path": class_path(value.func), "init_args": keywords}
    return class_path(value) if hasattr(value, "__qualname__") else class_record(value)


def _record_optimizer(build: Callable[..., Any]) -> dict[str, Any]:
    """Return the class and settings of the optimizer that a function builds; ``{}`` if it fails.

    Two functions without names have no other difference.
    """
    try:
        optimizer = build([nn.Parameter(torch.zeros(1))])
        settings = {
            name: value
            for name, value in optimizer.defaults.items()
            if isinstance(value, bool | int | float | str)
        }
        return {"class_path": class_path(type(optimizer)), "init_args": settings}
    except Exception:  # another check refuses the function
        return {}


def _record_module(module: nn.Module) -> dict[str, Any]:
    """Return a record of a module that does not record its arguments."""
    if not any(module.children()):
        attributes = vars(module).items()
        plain = {name: v for name, v in attributes if isinstance(v, bool | int | float | str)}
        return {
            name: value
            for name, value in plain.items()
            if name != "training" and not name.startswith("_")
        }
    layers = [submodule for submodule in module.modules() if not any(submodule.children())]
    text = ", ".join(f"{type(layer).__name__}({layer.extra_repr()})" for layer in layers)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    if len(text) > _MAX_LETTERS:  # the digest distinguishes nets that differ behind the limit
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        text = f"{text[:_MAX_LETTERS]}… {digest[:8]}"
    return {"parameters": num_parameters, "layers": text}
