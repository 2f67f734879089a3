"""Types of arguments: their classes and items, values that fit them, and refusals of others."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, timedelta
from enum import Enum
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from torch import Tensor

from pl_fed.command.layers import Option, refuse
from pl_fed.command.messages import shorten, suggest_name
from pl_fed.command.parser import Parser

_VALUES = (  # types of values that are written without a class_path
    *(bool, int, float, complex, str, bytes, list, tuple, dict, set, NoneType),
    *(Enum, PathLike, date, timedelta, Tensor),
)
_QUOTES = ": put it in quotes if it is a name, because YAML reads yes, no, on and off as booleans"


def _members(kind: Any) -> list[Any]:
    """Return the types in a type: those of a union, without ``None``."""
    if get_origin(kind) not in (Union, UnionType):
        return [] if kind is NoneType else [kind]
    return [member for inner in get_args(kind) for member in _members(inner)]


def item_type(kind: Any, value: Any) -> Any:
    """Return the type of the items of a list or mapping; ``None`` if there is not exactly one."""
    lists: tuple[Any, ...] = (Sequence, Iterable, list, tuple) if isinstance(value, list) else ()
    origins = (Mapping, dict) if isinstance(value, dict) else lists
    containers = [get_args(member) for member in _members(kind) if get_origin(member) in origins]
    types = [types[1:] if isinstance(value, dict) else types for types in containers]
    items = list(dict.fromkeys(item for inner in types for item in inner))
    return items[0] if len(items) == 1 else None


def class_types(kind: Any) -> tuple[tuple[type, ...], int]:
    """Return the classes that a type takes by name, and how many arguments pl_fed gives them."""
    bases: list[type] = []
    skipped = 0
    for member in _members(kind):
        if get_origin(member) is Callable and len(get_args(member)) == 2:
            skipped = len(get_args(member)[0])
            bases += class_types(get_args(member)[1])[0]
        elif isinstance(member, type) and not get_args(member) and not issubclass(member, _VALUES):
            bases.append(member)
    return tuple(bases), skipped


def fits(kind: Any, value: Any) -> bool:
    """Return whether jsonargparse accepts a value for a type."""
    parser = Parser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=kind)
    except ValueError:  # a type that jsonargparse does not know
        return True
    try:
        if isinstance(value, Option):
            parser.parse_args([f"--value={value.text}"])
        else:
            parser.parse_object({"value": value})
    except Exception:  # of many kinds
        return False
    return True


def fits_without_class(kind: Any, value: Any) -> bool:
    """Return whether a value fits a type otherwise than as the name of a class."""
    return any(fits(member, value) for member in _members(kind) if not class_types(member)[0])


def refuse_type(kind: Any, value: Any, path: str) -> NoReturn:
    """Raise the fault of a value of another type."""
    types = [member for member in _members(kind) if member not in (Path, Tensor)]
    choices = [choice for kind in types if get_origin(kind) is Literal for choice in get_args(kind)]
    types = [get_origin(member) or member for member in types if get_origin(member) is not Literal]
    names = dict.fromkeys(getattr(member, "__name__", str(member)) for member in types)
    expected = [f"one of {', '.join(map(repr, choices))}"] if choices else []
    expected += [f"of type {' or '.join(names)}"] if names else []
    suggestion = suggest_name(str(value), list(map(str, choices)))
    if isinstance(value, bool) and (choices or str in types):
        suggestion = _QUOTES
    elif isinstance(value, int | float) and types == [str]:
        suggestion = f": put it in quotes if it is a name, because YAML reads {value} as a number"
    refuse(path, f"be {', or '.join(expected)}", f"{shorten(value)}{suggestion}")
