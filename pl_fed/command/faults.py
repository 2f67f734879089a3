"""Fault of a command line: finds what jsonargparse refused, and describes it in one sentence.

jsonargparse alone decides whether a command line is valid. After a refusal, this module looks for
the fault and reads no message of jsonargparse: it merges configs and options, resolves the classes,
and asks jsonargparse of each value whether it fits its argument.
"""

import inspect
import sys
from argparse import Action
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from enum import Enum
from importlib import import_module
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import yaml
from jsonargparse import Namespace
from torch import Tensor

from pl_fed.command.config_files import (
    FEDERATION_SECTIONS,
    SECTIONS,
    complete_config,
    find_config_fault,
    load,
    read_text,
    reason,
)
from pl_fed.command.messages import SUBCOMMANDS, list_names, shorten, suggest_name
from pl_fed.command.parser import Parser

_YAML = (".yaml", ".yml")
_SECTIONS = (*SECTIONS, *(f"federation.{name}" for name in FEDERATION_SECTIONS))
_SPECIFICATION = {"class_path", "init_args", "dict_kwargs"}
_VALUES = (  # types of values that are written without a class_path
    *(bool, int, float, complex, str, bytes, list, tuple, dict, set, NoneType),
    *(Enum, PathLike, date, timedelta, Tensor),
)
_QUOTES = ": put it in quotes if it is a name, because YAML reads yes, no, on and off as booleans"
_PRINTS = ("", "comments", "skip_default", "skip_unset")
_FORMER = "former arguments"  # of the class before a later class_path
NEW_PATHS = {
    "attack": "adversary.attack",
    "attackers_know": "adversary.knowledge",
    "byzantine": "adversary.fraction",
    "byzantine_from": "adversary.start_round",
    "chunk_size": "engine.chunk_size",
    "compile_mode": "engine.compile_mode",
    "corruption": "adversary.corruption",
    "engine": "engine.name",
    "num_byzantine": "adversary.expected",
    "redraw_byzantine": "adversary.redraw",
    "state_memory": "storage.memory",
    "store": "storage.folder",
}
"""Former arguments of the section ``federation``, with their paths below it."""


class FaultError(Exception):
    """Fault of a command line; the message is the sentence for the user."""


@dataclass(frozen=True)
class _Option:
    """Option: a value of the command line.

    Attributes:
        words: The option as typed, such as ``--data.num_clients=3``.
        text: The text of the value; ``None`` if the command line ends before it.
    """

    words: str
    text: str | None

    def __repr__(self) -> str:
        return str(self.text)


class _Appended(list[Any]):
    """Values that an option with ``+=`` appends to a list."""


def find_fault(parser: Parser, arguments: Sequence[str]) -> str:
    """Describe the fault of a command line that the parser refused; empty if none is found.

    Args:
        parser: The parser, with or without subcommands.
        arguments: The command line without the program's name.
    """
    words = list(arguments)
    if parser._subcommands_action is not None:
        parsers = parser._subcommands_action.choices
        if not words or words[0] not in parsers:
            got = repr(words[0]) if words else "none"
            return f"Expected a subcommand, one of {', '.join(SUBCOMMANDS)}, but got {got}."
        parser = parsers[words.pop(0)]
    try:
        config: Any = {}
        for name, option in _read_options(words):
            layer = _read_config(option) if name == "config" else _nest(name, option)
            config = _merge(config, layer)
        _check_arguments(parser, config, "", "")
    except FaultError as fault:
        return str(fault)
    for name, option in _read_options(words):
        if option.text == "null" and name.count(".") > 1:  # jsonargparse passes it on as text
            path = name.replace(".init_args.", ".")
            return (
                f"Expected argument `{path}` to be set to null in a config file but got null on the"
                " command line, which cannot set null for an argument of a class within a class."
            )
    return ""


def _read_options(words: Sequence[str]) -> Iterator[tuple[str, _Option]]:
    """Yield the names and the values of the options of a command line."""
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("-"):
            raise FaultError(f"Expected only options that --help lists but got {word}.")
        name, equals, text = word.lstrip("-").partition("=")
        value: str | None = text
        if not equals and not name.startswith("print_config"):
            value = next(remaining, None)
            word = word if value is None else f"{word} {value}"
        yield "config" if name == "c" else name, _Option(word, value)


def _read_config(option: _Option) -> Any:
    """Return the values in a config file."""
    path = Path(str(option))
    if not path.is_file():
        raise FaultError(
            f"Expected argument `config` to be a file but found none at '{path.absolute()}'."
        )
    fault = find_config_fault(path)
    config = {} if fault else load(complete_config(read_text(path)))
    if not isinstance(config, dict):  # jsonargparse loads a single empty section as text
        raise FaultError(
            "Expected argument `config` to be a file of YAML with sections but got one that holds"
            " only an empty model."
        )
    if fault:
        raise FaultError(
            f"Expected argument `config` to be a file of YAML with sections but got {option}:"
            f" {fault}."
        )
    return config


def _nest(name: str, option: _Option) -> Any:
    """Return an option as a config that has only its value."""
    is_file = str(option).endswith(_YAML)
    value: Any = option if is_file and name not in _SECTIONS else _read_structure(name, option)
    if name.endswith("+"):
        name, value = name[:-1], _Appended(value if isinstance(value, list) else [value])
    for key in reversed(name.split(".")):
        value = {key: value}
    return value


def _read_structure(path: str, value: Any) -> Any:
    """Return the mapping or list in a text, or in the YAML file that it names; else the value."""
    text = str(value) if isinstance(value, str | _Option) else ""
    is_file = text.endswith(_YAML)
    if is_file and not Path(text).is_file():
        raise FaultError(f"Expected argument `{path}` to be a YAML file but found none at {text}.")
    try:
        structure = load(read_text(text) if is_file else text)
    except (TypeError, yaml.YAMLError) as error:
        if is_file and isinstance(error, yaml.YAMLError):
            raise FaultError(
                f"Expected argument `{path}` to be a YAML file but got {text}: {reason(error)}."
            ) from None
        return value
    return structure if isinstance(structure, dict | list) else value


def _merge(old: Any, new: Any) -> Any:
    """Return a value that a later one changes: mappings are merged, other values replaced."""
    if isinstance(new, _Appended):
        return [*(old if isinstance(old, list) else []), *new]
    if isinstance(old, list) and old and isinstance(new, dict):  # an option of its last class
        return [*old[:-1], _merge(old[-1], new)]
    if isinstance(old, str | _Option) and isinstance(new, dict):
        old = {"class_path": old}
    if isinstance(old, dict) and isinstance(new, str | _Option):
        new = {"class_path": new} if "class_path" in old else new
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    if "class_path" not in old:
        return {**old, **{name: _merge(old.get(name), value) for name, value in new.items()}}
    arguments = _arguments(old)
    if str(new.get("class_path", old["class_path"])) == str(old["class_path"]):
        return {**old, "init_args": _merge(arguments, _arguments(new))}
    return {**new, _FORMER: {**old.get(_FORMER, {}), **arguments}}


def _arguments(node: dict[str, Any]) -> Any:
    """Return the arguments of a class: below ``init_args``, beside it, or both."""
    beside = {key: value for key, value in node.items() if key not in (*_SPECIFICATION, _FORMER)}
    arguments = node.get("init_args", {})
    return {**arguments, **beside} if isinstance(arguments, dict) else arguments


def _check_arguments(parser: Parser, values: dict[str, Any], path: str, owner: str) -> None:
    """Check that a parser has all arguments, that their values fit, and that none is missing.

    Args:
        parser: The parser of the command line, or of a class.
        values: The values by name, those of sections in mappings.
        path: The path of the class in the config; empty for the command line.
        owner: The name of the class; empty for the command line.
    """
    actions = {action.dest: action for action in parser._actions if hasattr(action, "_typehint")}
    actions = {name: action for name, action in actions.items() if not name.endswith(".help")}
    values_of_arguments = dict(_check_section(actions, values, "", path, owner))
    missing = [
        f"`{_join(path, name)}`"
        for name, action in sorted(actions.items())
        if (action.required or name == "model") and values_of_arguments.get(name) is None
    ]
    if missing:
        raise FaultError(f"Expected argument {' and '.join(missing)} to be set but got none.")


def _check_section(
    actions: dict[str, Action], values: dict[str, Any], section: str, path: str, owner: str
) -> Iterator[tuple[str, Any]]:
    """Check the values of a section of a parser, and yield them with their full names."""
    for key, value in values.items():
        name, place = _join(section, str(key)), _join(path, section, str(key))
        if name in actions:
            _check_value(actions[name]._typehint, value, place, actions[name].default)
            yield name, value
        elif name == "print_config" and str(value) not in _PRINTS:
            raise FaultError(
                "Expected argument `print_config` to be one of comments, skip_default or skip_unset"
                f" but got {value}."
            )
        elif not any(other.startswith(f"{name}.") for other in actions):
            _refuse_unknown(actions, section, str(key), value, path, owner)
        elif isinstance(value, dict) and "class_path" not in value:
            yield from _check_section(actions, value, name, path, owner)
        elif isinstance(value, dict):
            raise FaultError(
                f"Expected argument `{place}` to be a mapping of arguments without a class_path but"
                f" got the class_path {value['class_path']}."
            )
        elif value is not None:
            raise FaultError(
                f"Expected argument `{place}` to be a mapping of arguments, or a YAML file that"
                f" holds one, but got {shorten(value)}{_suggest_new_path(place)}."
            )


def _join(*names: str) -> str:
    return ".".join(filter(None, names))


def _refuse_unknown(
    actions: Mapping[str, Action], section: str, key: str, value: Any, path: str, owner: str
) -> NoReturn:
    """Raise the fault of an argument that a class, or the command line, does not have."""
    depth = f"{section}." if section else ""
    names = [name.removeprefix(depth) for name in actions if name.startswith(depth)]
    names = list(dict.fromkeys(name.partition(".")[0] for name in names))
    similar = suggest_name(key, names)
    if owner:
        similar = similar or list_names(names)
        raise FaultError(
            f"Expected argument `{path}` to hold only options of {owner} but got `{key}`{similar}."
        )
    got = _join(section, key)
    suggestion = _suggest_new_path(got)
    if not suggestion and ("." in section or not section):
        suggestion = similar or (list_names(names) if section else "")
    while isinstance(value, dict) and value:
        inner, value = next(iter(value.items()))
        got = _join(got, str(inner))
    got = value.words if isinstance(value, _Option) else got
    raise FaultError(f"Expected only options that --help lists but got {got}{suggestion}.")


def _suggest_new_path(path: str) -> str:
    """Suggest the new path of a former argument of the section ``federation``."""
    section, _, name = path.partition(".")
    new_path = NEW_PATHS.get(name) if section == "federation" else None
    return f" (did you mean federation.{new_path}?)" if new_path else ""


def _check_value(kind: Any, value: Any, path: str, default: Any = None) -> None:
    """Check the value of an argument.

    Args:
        kind: The type of the argument.
        value: The value; classes are mappings, or names.
        path: The path of the argument.
        default: The default of the argument, which may name a class.
    """
    if value is None:
        return
    if isinstance(value, _Option) and value.text is None:
        raise FaultError(f"Expected argument `{path}` to be followed by a value but got none.")
    bases, skipped = _class_types(kind)
    item = _item_type(kind, value)
    if item is not None:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _check_value(item, inner, f"{path}[{key}]")
        if not (_class_types(item)[0] or _fits(kind, value)):
            _refuse_type(kind, value, path)
    elif bases and isinstance(value, dict):
        _check_class(bases, skipped, value, path, default)
    elif not _fits(kind, value):
        if not bases:
            _refuse_type(kind, value, path)
        structure = _read_structure(path, value)
        if not isinstance(structure, dict | str | _Option):
            _refuse_no_class(bases, value, path)
        node = structure if isinstance(structure, dict) else {"class_path": structure}
        _check_class(bases, skipped, node, path, default)


def _check_class(
    bases: tuple[type, ...], skipped: int, node: dict[str, Any], path: str, default: Any
) -> None:
    """Check a class in a config, and its arguments.

    Args:
        bases: The classes of which one must be a parent.
        skipped: The number of arguments that pl_fed gives.
        node: The class and its arguments.
        path: The path of the argument.
        default: The default of the argument, which may name a class.
    """
    arguments = _arguments(node)
    if not isinstance(arguments, dict):
        kind = "null" if arguments is None else type(arguments).__name__
        raise FaultError(
            f"Expected argument `{path}` to have a mapping of arguments as `init_args` but got one"
            f" of type {kind}."
        )
    if getattr(arguments.get("help"), "text", None):
        _find_class(str(arguments["help"]), bases, f"{path}.help")
    if "class_path" in node:
        name = node["class_path"]
    elif isinstance(default, Mapping | Namespace):
        name = default["class_path"]
    elif arguments and arguments.keys() <= inspect.signature(bases[0]).parameters.keys():
        name = _public_path(bases[0])
    else:
        _refuse_no_class(bases, node, path)
    if not isinstance(name, str | _Option):
        raise FaultError(
            f"Expected argument `{path}` to name a class by its `class_path` but got a class_path"
            f" of type {'null' if name is None else type(name).__name__}."
        )
    kind = _find_class(str(name).strip(), bases, path)
    if kind is None:
        return
    parser = Parser(exit_on_error=False)
    parser.add_class_arguments(kind, fail_untyped=False, skip={skipped} if skipped else None)
    names = {action.dest.partition(".")[0] for action in parser._actions}
    former = {key: value for key, value in node.get(_FORMER, {}).items() if key in names}
    beside = node.keys() - {*_SPECIFICATION, _FORMER}
    if beside and "class_path" in node and beside <= names:
        raise FaultError(
            f"Expected argument `{path}` to have its arguments below `init_args` but got"
            f" `{sorted(beside)[0]}` beside `class_path`."
        )
    _check_arguments(parser, {**former, **arguments}, path, _public_path(kind))


def _public_path(kind: type) -> str:
    """Return the path of a class: from the package of its module, if that exports it."""
    package = kind.__module__.rpartition(".")[0]
    is_exported = getattr(sys.modules.get(package), kind.__name__, None) is kind
    return f"{package if is_exported else kind.__module__}.{kind.__qualname__}"


def _refuse_no_class(bases: tuple[type, ...], value: Any, path: str) -> NoReturn:
    """Raise the fault of a value that names no class."""
    raise FaultError(
        f"Expected argument `{path}` to name a subclass of {_list_classes(bases)} by its"
        f" `class_path` but got {shorten(value)}."
    )


def _list_classes(bases: tuple[type, ...]) -> str:
    return " or ".join(base.__name__ for base in bases)


def _find_class(name: str, bases: tuple[type, ...], path: str) -> type | None:
    """Return the class with a name or path; ``None`` if it is a function, which may build one.

    Raises:
        FaultError: If there is none, or it is abstract or no subclass of one of the bases.
    """
    if "." not in name:
        kinds = {kind.__name__: kind for base in bases for kind in _subclasses(base)}
        if name not in kinds:
            raise FaultError(
                f"Expected argument `{path}` to be the path of a class but got"
                f" {shorten(name)}{suggest_name(name, list(kinds))}."
            )
        found: Any = kinds[name]
    else:
        found = _import(name, path)
    if inspect.isfunction(found):  # it may build an object of the class that it returns
        found = inspect.signature(found).return_annotation
        if isinstance(found, str):
            return None
    if not (isinstance(found, type) and issubclass(found, bases)):
        raise FaultError(
            f"Expected argument `{path}` to be a subclass of {_list_classes(bases)} but got {name}."
        )
    if inspect.isabstract(found):
        methods = " and no ".join(sorted(found.__abstractmethods__))
        raise FaultError(
            f"Expected argument `{path}` to name a class that can be made, by its `class_path`, but"
            f" {name} is abstract: it has no {methods}."
        )
    return found


def _subclasses(base: type) -> Iterator[type]:
    """Yield a class and its imported subclasses that have no private name."""
    if not base.__name__.startswith("_"):
        yield base
    for child in base.__subclasses__():
        yield from _subclasses(child)


def _import(name: str, path: str) -> Any:
    """Return the object at a dotted path."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise FaultError(
            f"Expected argument `{path}` to be the path of a class but got {shorten(name)}."
        )
    found: Any = None
    for position, part in enumerate(parts):
        module = ".".join(parts[: position + 1])
        if hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = import_module(module)
        except Exception as error:
            if not isinstance(error, ModuleNotFoundError) or error.name != module:
                raise FaultError(
                    f"Expected argument `{path}` to be the path of a class but the import of"
                    f" {module} failed: {type(error).__name__}: {error}."
                ) from None
            if found is None:
                files = [file.stem for file in Path().glob("*.py")]
                suggestion = suggest_name(part, ["pl_fed", "torch", "lightning", *files])
                raise FaultError(
                    f"Expected argument `{path}` to be the path of a class but got: {error}"
                    f"{suggestion}."
                ) from None
            raise FaultError(
                f"Expected argument `{path}` to be a class but {'.'.join(parts[:position])} has no"
                f" {part}{suggest_name(part, dir(found))}."
            ) from None
    return found


def _members(kind: Any) -> list[Any]:
    """Return the types in a type: those of a union, without ``None``."""
    if get_origin(kind) not in (Union, UnionType):
        return [] if kind is NoneType else [kind]
    return [member for inner in get_args(kind) for member in _members(inner)]


def _item_type(kind: Any, value: Any) -> Any:
    """Return the type of the items of a list or mapping; ``None`` if there is not exactly one."""
    origins = {list: (Sequence, Iterable, list, tuple), dict: (Mapping, dict)}.get(type(value), ())
    containers = [get_args(member) for member in _members(kind) if get_origin(member) in origins]
    types = [types[1:] if isinstance(value, dict) else types for types in containers]
    items = list(dict.fromkeys(item for inner in types for item in inner))
    return items[0] if len(items) == 1 else None


def _class_types(kind: Any) -> tuple[tuple[type, ...], int]:
    """Return the classes that a type takes by their names, and how many arguments pl_fed gives."""
    bases: list[type] = []
    skipped = 0
    for member in _members(kind):
        if get_origin(member) is Callable and len(get_args(member)) == 2:
            given, result = get_args(member)
            skipped = len(given)
            bases += _class_types(result)[0]
        elif inspect.isclass(member) and not issubclass(member, _VALUES) and not get_args(member):
            bases.append(member)
    return tuple(bases), skipped


def _fits(kind: Any, value: Any) -> bool:
    """Return whether jsonargparse accepts a value for a type."""
    parser = Parser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=kind)
    except ValueError:  # a type that jsonargparse does not know
        return True
    try:
        if isinstance(value, _Option):
            parser.parse_args([f"--value={value.text}"])
        else:
            parser.parse_object({"value": value})
    except Exception:  # of many kinds
        return False
    return True


def _refuse_type(kind: Any, value: Any, path: str) -> NoReturn:
    """Raise the fault of a value of another type."""
    kinds = _members(kind)
    literals = [
        choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)
    ]
    types = [get_origin(kind) or kind for kind in kinds if get_origin(kind) is not Literal]
    types = [kind for kind in types if kind not in (Path, Tensor)]  # other types are easier to give
    names = dict.fromkeys(getattr(kind, "__name__", str(kind)) for kind in types)
    expected = [f"one of {', '.join(map(repr, literals))}"] if literals else []
    expected += [f"of type {' or '.join(names)}"] if names else []
    suggestion = suggest_name(str(value), [str(choice) for choice in literals])
    if isinstance(value, bool) and (literals or str in kinds):
        suggestion = _QUOTES
    raise FaultError(
        f"Expected argument `{path}` to be {', or '.join(expected)} but got"
        f" {shorten(value)}{suggestion}."
    )
