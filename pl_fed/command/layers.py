"""Layers of a command line: configs and options, merged into one tree of values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from pl_fed.command.config_files import (
    FEDERATION_SECTIONS,
    SECTIONS,
    complete_config,
    find_config_fault,
    load,
    read_text,
    reason,
)
from pl_fed.command.parser import RefusalError

FORMER = "former arguments"
"""The key in a class's node with the arguments of the class before a later class_path."""
SPECIFICATION = {"class_path", "init_args", "dict_kwargs", FORMER}
"""The keys in a class's node that are no arguments."""
_YAML = (".yaml", ".yml")
_FILES = (*SECTIONS, *(f"federation.{name}" for name in FEDERATION_SECTIONS))


@dataclass(frozen=True)
class Option:
    """Option: the words of an option as typed, and its value; ``None`` if the words end before."""

    words: str
    text: str | None

    def __repr__(self) -> str:
        return str(self.text)


class _Appended(list[Any]):
    """Values that an option with ``+=`` appends to a list."""


def refuse(path: str, expected: str, got: object) -> NoReturn:
    """Raise the refusal of an argument."""
    raise RefusalError(f"Expected argument `{path}` to {expected} but got {got}.")


def refuse_option(got: str, suggestion: str = "") -> NoReturn:
    """Raise the refusal of an option that does not exist."""
    raise RefusalError(f"Expected only options that --help lists but got {got}{suggestion}.")


def merge_layers(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of a command line: of its configs and options, the later ones winning.

    Args:
        words: The command line without the names of the program and the subcommand.

    Raises:
        RefusalError: If a config is none, or a word is no option.
    """
    tree: dict[str, Any] = {}
    for name, option in read_options(words):
        tree = _merge(tree, _read_config(option.text) if name == "config" else _nest(name, option))
    return tree


def read_options(words: Sequence[str]) -> Iterator[tuple[str, Option]]:
    """Yield the names and the values of the options of a command line."""
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("-"):
            refuse_option(word)
        name, equals, text = word.lstrip("-").partition("=")
        value: str | None = text
        if not equals and name != "print_config":
            value = next(remaining, None)
            word = word if value is None else f"{word} {value}"
        yield "config" if name == "c" else name, Option(word, value)


def _read_config(path: str | None) -> Any:
    """Return the values in a config file."""
    if path is None:
        refuse("config", "be followed by a value", "none")
    if not Path(path).is_file():
        place = f"'{Path(path).absolute()}'"
        raise RefusalError(f"Expected argument `config` to be a file but found none at {place}.")
    fault = find_config_fault(path)
    config = None if fault else load(complete_config(read_text(path)))
    if not isinstance(config, dict):  # jsonargparse loads a single empty section as text
        got = f"{path}: {fault}" if fault else "one that holds only an empty model"
        refuse("config", "be a file of YAML with sections", got)
    return _mark_appended(config)


def _mark_appended(tree: Any) -> Any:
    """Return a config whose keys with ``+`` at their end append to the list of earlier layers."""
    if not isinstance(tree, dict):
        return tree
    marked = {}
    for key, value in tree.items():
        name, plus, end = str(key).rpartition("+")
        if plus and name and not end:
            marked[name] = _Appended(value if isinstance(value, list) else [value])
        else:
            marked[key] = _mark_appended(value)
    return marked


def _nest(name: str, option: Option) -> Any:
    """Return an option as a config that has only its value."""
    is_other_file = str(option).endswith(_YAML) and name not in _FILES
    value: Any = option if is_other_file else read_structure(name, option)
    value = None if option.text == "null" else value
    if name.endswith("+"):
        name, value = name[:-1], _Appended(value if isinstance(value, list) else [_plain(value)])
    for key in reversed(name.split(".")):
        value = {key: value}
    return value


def _plain(value: Any) -> Any:
    return value.text if isinstance(value, Option) else value


def read_structure(path: str, value: Any) -> Any:
    """Return the mapping or list in a text, or in the YAML file that it names; else the value."""
    text = str(value) if isinstance(value, str | Option) else ""
    is_file = text.endswith(_YAML)
    try:
        structure = load(read_text(text) if is_file else text)
    except (TypeError, yaml.YAMLError) as error:
        if is_file and isinstance(error, yaml.YAMLError):
            refuse(path, "be a YAML file of its arguments", f"{text}: {reason(error)}")
        return value
    return structure if isinstance(structure, dict | list) else value


def _merge(old: Any, new: Any) -> Any:
    """Return a value that a later one changes: mappings are merged, other values replaced."""
    if isinstance(new, _Appended):
        return [*(old if isinstance(old, list) else []), *new]
    if isinstance(old, list) and old and isinstance(new, dict):  # an option of its last class
        return [*old[:-1], _merge(old[-1], new)]
    if isinstance(old, str | Option) and isinstance(new, dict):
        old = {"class_path": old}
    if isinstance(old, dict) and isinstance(new, str | Option) and "class_path" in old:
        new = {"class_path": new}
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    if "class_path" not in old:
        return {**old, **{name: _merge(old.get(name), value) for name, value in new.items()}}
    arguments = arguments_of(old)
    if not isinstance(arguments, dict):
        return old  # its fault comes first
    if str(new.get("class_path", old["class_path"])) == str(old["class_path"]):
        return {**old, "init_args": _merge(arguments, arguments_of(new))}
    return {**new, FORMER: {**old.get(FORMER, {}), **arguments}}


def arguments_of(node: dict[str, Any]) -> Any:
    """Return the arguments of a class: below ``init_args``, beside it, or both."""
    beside = {key: value for key, value in node.items() if key not in SPECIFICATION}
    arguments = node.get("init_args", {})
    return {**arguments, **beside} if isinstance(arguments, dict) else arguments
