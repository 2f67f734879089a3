"""Fault of a command line: found after a refusal of jsonargparse, and told in one sentence.

jsonargparse alone decides whether a command line is valid. After a refusal, this module looks for
the fault and reads no message of jsonargparse: it merges configs and options, resolves the classes,
and asks jsonargparse of each value whether it fits its argument.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from pl_fed.command.argument_types import (
    class_types,
    fits,
    fits_without_class,
    item_type,
    refuse_type,
)
from pl_fed.command.classes import find_class, list_classes, public_path
from pl_fed.command.layers import (
    FORMER,
    SPECIFICATION,
    Option,
    arguments_of,
    merge_layers,
    read_options,
    read_structure,
    refuse,
    refuse_option,
)
from pl_fed.command.messages import SUBCOMMANDS, list_names, shorten, suggest_name
from pl_fed.command.parser import Parser, RefusalError

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


def find_fault(parser: ArgumentParser, arguments: Sequence[str]) -> str:
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
        _check_arguments(parser, merge_layers(words), "", "")
        for name, option in read_options(words):
            if option.text == "null" and name.count(".") > 1:  # jsonargparse passes it on as text
                got = "null on the command line, which cannot set it in a class within a class"
                refuse(name, "be set to null in a config file", got)
    except RefusalError as fault:
        return str(fault)
    except Exception:  # of a class of the user's that cannot be inspected: the refusal remains
        return ""
    return ""


def _check_arguments(parser: ArgumentParser, values: dict[str, Any], path: str, owner: str) -> None:
    """Check that a parser has all arguments, that their values fit, and that none is missing.

    Args:
        parser: The parser of the command line, or of a class.
        values: The values by name, those of sections in mappings.
        path: The path of the class in the config; empty for the command line.
        owner: The name of the class; empty for the command line.
    """
    actions: dict[str, Any] = {
        action.dest: action
        for action in parser._actions
        if hasattr(action, "_typehint") and not action.dest.endswith(".help")
    }
    checked = dict(_check_section(actions, values, "", path, owner))
    missing = [
        f"`{_join(path, name)}`"
        for name, action in sorted(actions.items())
        if (action.required or name == "model") and checked.get(name) is None
    ]
    if missing:
        raise RefusalError(f"Expected argument {' and '.join(missing)} to be set but got none.")


def _check_section(
    actions: Mapping[str, Any], values: dict[str, Any], section: str, path: str, owner: str
) -> Iterator[tuple[str, Any]]:
    """Check the values of a section of a parser, and yield them with their full names."""
    for key, value in values.items():
        name, place = _join(section, key), _join(path, section, key)
        if name in actions:
            _check_value(actions[name]._typehint, value, place, actions[name].default)
            yield name, value
        elif name == "print_config":
            if str(value) not in ("", "comments", "skip_default", "skip_unset"):
                refuse(name, "be one of comments, skip_default or skip_unset", value)
        elif not any(other.startswith(f"{name}.") for other in actions):
            _refuse_unknown(actions, section, str(key), value, path, owner)
        elif isinstance(value, dict) and "class_path" not in value:
            yield from _check_section(actions, value, name, path, owner)
        elif isinstance(value, dict):
            got = f"the class_path {value['class_path']}"
            refuse(place, "be a mapping of arguments without a class_path", got)
        else:
            got = f"{shorten(value)}{_suggest_new_path(place)}"
            got = "null: leave it out for its defaults" if value is None else got
            refuse(place, "be a mapping of arguments, or a YAML file that holds one,", got)


def _join(*names: object) -> str:
    return ".".join(filter(None, map(str, names)))


def _refuse_unknown(
    actions: Mapping[str, Any], section: str, key: str, value: Any, path: str, owner: str
) -> NoReturn:
    """Raise the fault of an argument that a class, or the command line, does not have."""
    depth = f"{section}." if section else ""
    names = [name.removeprefix(depth) for name in actions if name.startswith(depth)]
    names = list(dict.fromkeys(name.partition(".")[0] for name in names))
    suggestion = suggest_name(key, names)
    if owner:
        got = f"`{key}`{suggestion or list_names(names)}"
        refuse(path, f"hold only options of {owner}", got)
    typed = _join(section, key)
    new_path = _suggest_new_path(typed)
    while isinstance(value, dict) and value:
        inner, value = next(iter(value.items()))
        typed = _join(typed, inner)
    if "." in section:
        suggestion = suggestion or list_names(names)
    elif section and isinstance(value, Option):  # the hint suggests options that are alike
        suggestion = ""
    suggestion = new_path or suggestion
    refuse_option(value.words if isinstance(value, Option) else typed, suggestion)


def _suggest_new_path(path: str) -> str:
    """Suggest the new path of a former argument of the section ``federation``."""
    section, _, name = path.partition(".")
    new_path = NEW_PATHS.get(name) if section == "federation" else None
    return f" (did you mean federation.{new_path}?)" if new_path else ""


def _check_value(kind: Any, value: Any, path: str, default: Any = None) -> None:
    """Check the value of an argument; its default may name a class."""
    if value is None:
        _check_null(kind, path, default)
        return
    if isinstance(value, Option) and value.text is None:
        refuse(path, "be followed by a value", "none")
    (bases, skipped), item = class_types(kind), item_type(kind, value)
    if item is not None:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _check_value(item, inner, f"{path}[{key}]")
        if not (class_types(item)[0] or fits(kind, value)):
            refuse_type(kind, value, path)
    elif bases and isinstance(value, dict):
        typed = value.get("class_path")  # over the class of a config, also `false` looks like one
        if not (isinstance(typed, Option) and fits_without_class(kind, typed)):
            _check_class(bases, skipped, value, path, default)
    elif not fits(kind, value):
        if not bases:
            refuse_type(kind, value, path)
        _check_class(bases, skipped, _read_class(bases, value, path), path, default)


def _check_null(kind: Any, path: str, default: Any) -> None:
    """Refuse null for an argument if its type and default do not allow it."""
    if default is not None and not fits(kind, Option("null", "null")):
        refuse_type(kind, "null", path)


def _read_class(bases: tuple[type, ...], value: Any, path: str) -> dict[str, Any]:
    """Return the node of a class that is given by its name or in a file."""
    node = read_structure(path, value)
    node = {"class_path": node} if isinstance(node, str | Option) else node
    return node if isinstance(node, dict) else _refuse_class(bases, value, path)


def _check_class(
    bases: tuple[type, ...], skipped: int, node: dict[str, Any], path: str, default: Any
) -> None:
    """Check a subclass of one of the bases in a config, and its arguments."""
    arguments = arguments_of(node)
    if not isinstance(arguments, dict):
        got = f"one of type {_type_name(arguments)}"
        refuse(path, "have a mapping of arguments as `init_args`", got)
    if getattr(arguments.get("help"), "text", None):
        find_class(str(arguments["help"]), bases, f"{path}.help")
    if "class_path" in node:
        name = node["class_path"]
    elif isinstance(default, Mapping | Namespace):
        name = default["class_path"]
    elif arguments and arguments.keys() <= inspect.signature(bases[0]).parameters.keys():
        name = public_path(bases[0])
    else:
        _refuse_class(bases, node, path)
    if not isinstance(name, str | Option):
        got = f"a class_path of type {_type_name(name)}"
        refuse(path, "name a class by its `class_path`", got)
    kind = find_class(str(name).strip(), bases, path)
    if kind is None:
        return
    parser = Parser(exit_on_error=False)
    parser.add_class_arguments(kind, fail_untyped=False, skip={skipped} if skipped else None)
    names = {action.dest.partition(".")[0] for action in parser._actions}
    former = {key: value for key, value in node.get(FORMER, {}).items() if key in names}
    if "class_path" in node and (beside := (node.keys() - SPECIFICATION) & names):
        got = f"`{min(beside)}` beside `class_path`"
        refuse(path, "have its arguments below `init_args`", got)
    _check_arguments(parser, {**former, **arguments}, path, public_path(kind))


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _refuse_class(bases: tuple[type, ...], value: Any, path: str) -> NoReturn:
    """Raise the fault of a value that names no class."""
    expected = f"name a subclass of {list_classes(bases)} by its `class_path`"
    refuse(path, expected, shorten(value))
