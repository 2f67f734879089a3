"""Config files: reads YAML, and refuses unsafe texts and invalid values with one sentence."""

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin

import yaml
from jsonargparse import get_loader
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

SECTIONS = ("model", "data", "federation", "trainer")
FEDERATION_SECTIONS = ("adversary", "engine", "storage")
_CLASSES = {
    "data": "pl_fed.data.FederatedData",
    "federation": "pl_fed.federation.Federation",
    "trainer": "lightning.pytorch.Trainer",
}
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_DEPTH = 100  # jsonargparse and PyYAML recurse
_MAX_COPIES = 10_000  # most values that anchors may add to the written ones
_STRUCTURE = re.compile(r"[\[{&*\n]|: ")  # absent from texts of a single scalar
_STRING, _INTEGER = "tag:yaml.org,2002:str", "tag:yaml.org,2002:int"
_STANDARD = tuple(
    f"tag:yaml.org,2002:{name}"
    for name in ("null", "bool", "int", "float", "str", "seq", "map", "timestamp", "merge", "value")
)
_MERGE, _NULL = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:null"
_MAX_INTEGER = 2**63 - 1
_MAX_DIGITS = 100  # in any notation


class ConfigError(yaml.YAMLError):
    """Error of a text that is no config; the message is the reason."""


class UnsafeError(ConfigError):
    """Error of a text that would take too long to load, or never end."""


def read_text(path: str | Path) -> str:
    """Return the text of a UTF-8 file.

    Raises:
        ConfigError: If the file cannot be read or has another encoding.
    """
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"byte 0x{error.object[error.start]:02x} in line {line} is not UTF-8: save it as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(error.strerror or str(error)) from None
    except ValueError as error:  # NUL in the path
        raise ConfigError(str(error)) from None


def find_config_fault(path: str | Path) -> str:
    """Describe the fault of a config file; empty if the file is a config."""
    try:
        node = check_yaml(read_text(path))
    except yaml.YAMLError as error:
        return reason(error)
    if node is None or (isinstance(node, ScalarNode) and node.tag == _NULL):
        return "it is empty"
    if not isinstance(node, MappingNode):
        return f"it holds a {'list' if isinstance(node, SequenceNode) else 'single value'}"
    try:
        _check_sections(node)
    except ConfigError as error:
        return reason(error)
    return ""


def reason(error: yaml.YAMLError) -> str:
    r"""Return the reason of a YAML error in one line.

    Example:
        >>> try:
        ...     check_yaml("a: 1\na: 2")
        ... except yaml.YAMLError as error:
        ...     print(reason(error))
        `a` appears twice in one section (lines 1 and 2)
    """
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    mark = error.problem_mark or error.context_mark
    line = "" if mark is None else f" (line {mark.line + 1})"
    return f"{error.problem or error.context}{line}"


def check_yaml(text: str, loader: Any = _LOADER) -> Node | None:
    """Check a text and return its YAML nodes without constructing values.

    Args:
        text: The text.
        loader: PyYAML's class of loaders for it.

    Raises:
        yaml.YAMLError: If the text is no YAML, is nested too deeply, has a duplicate key or a key
            that is no name, or has anchors that contain themselves or multiply without end.
    """
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            _refuse_unsafe(f"it is nested more than {_MAX_DEPTH} levels deep", event)
    root: Node | None = yaml.compose(text, Loader=loader)
    if root is not None:
        _NodeChecker().visit(root)
    return root


def complete_config(text: str, logger_is_off: bool = False) -> str:
    """Return the text of a config with empty sections filled, and the engine as a section.

    Args:
        text: The text of the config.
        logger_is_off: Whether to leave out the loggers of the config.
    """
    text = name_engine_in_text(fill_empty_sections(text.removeprefix("\ufeff")))
    return replace_in_text(text, "trainer", "logger", "null") if logger_is_off else text


def fill_empty_sections(text: str) -> str:
    r"""Replace empty sections in the text of a config by empty mappings.

    The arguments of such a section get their defaults, as if the section were left out.

    Example:
        >>> print(fill_empty_sections("data:  # none\ntrainer: {max_epochs: 1}"))
        data: {}  # none
        trainer: {max_epochs: 1}
    """
    root = yaml.compose(text, Loader=_LOADER)
    if not isinstance(root, MappingNode):
        return text
    for key, value in reversed(root.value):
        if key.value in SECTIONS[1:] and value.tag == _NULL:
            start, end = value.start_mark.index, value.end_mark.index
            text = f"{text[:start]}{'' if text[start - 1] == ' ' else ' '}{{}}{text[end:]}"
    return text


def name_engine_in_text(text: str) -> str:
    """Replace an engine's name in the text of a config by the section ``engine`` with this name.

    Example:
        >>> name_engine_in_text("federation: {engine: stacked, seed: 1}")
        'federation: {engine: {name: stacked}, seed: 1}'
    """
    root = yaml.compose(text, Loader=_LOADER)
    for key, section in root.value if isinstance(root, MappingNode) else []:
        for name, value in section.value if isinstance(section, MappingNode) else []:
            is_text = isinstance(value, ScalarNode) and value.tag == _STRING
            if (key.value, name.value) == ("federation", "engine") and is_text:
                start, end = value.start_mark.index, value.end_mark.index
                if not _is_file(value.value):
                    return f"{text[:start]}{{name: {text[start:end]}}}{text[end:]}"
    return text


def replace_in_text(text: str, section: str, name: str, replacement: str) -> str:
    r"""Replace the value of an argument in the text of a config, if it is written there.

    A value with an anchor, or of an anchor, stays.

    Example:
        >>> replace_in_text("data: {dataset: {a: 1}, x: 1}", "data", "dataset", "null")
        'data: {dataset: null, x: 1}'
        >>> replace_in_text("data:\n  dataset: # mine\n  - a\n  x: 1", "data", "dataset", "null")
        'data:\n  dataset: null\n  x: 1'
    """
    root = yaml.compose(text, Loader=_LOADER)
    for key, node in root.value if isinstance(root, MappingNode) else []:
        for argument, value in node.value if isinstance(node, MappingNode) else []:
            if (key.value, argument.value) == (section, name):
                after = argument.end_mark.index
                start, end = value.start_mark.index, value.end_mark.index
                is_written = re.fullmatch(r"\s*:(\s|#.*)*", text[after:start])
                if is_written and text[start : start + 1] != "&":
                    end = start + len(text[start:end].rstrip())  # a block ends with its line break
                    return f"{text[:after]}: {replacement}{text[end:]}"
    return text


def name_engine(arguments: Sequence[str]) -> list[str]:
    """Return a command line with the name of an engine as ``federation.engine.name``.

    Example:
        >>> name_engine(["fit", "--federation.engine", "stacked"])
        ['fit', '--federation.engine.name', 'stacked']
    """
    option, named = "--federation.engine", list(arguments)
    for position, word in enumerate(named):
        name, _, value = word.partition("=")
        if name != option:
            continue
        value = value or next(iter(named[position + 1 : position + 2]), "")
        if value.isidentifier() and value != "null" and not _is_file(value):
            named[position] = word.replace(option, f"{option}.name", 1)
    return named


def _is_file(value: str) -> bool:
    """Return whether a value names a file that holds a section."""
    return value.endswith((".yaml", ".yml")) or Path(value).is_file()


def load(text: str) -> Any:
    """Check YAML by :func:`check_yaml`, and load it by jsonargparse's loader.

    Raises:
        yaml.YAMLError: If the check fails.
    """
    if _STRUCTURE.search(text):
        check_yaml(text)
    return get_loader("yaml")(text)


def check_arguments(arguments: Sequence[str]) -> None:
    """Check that every argument of a command line can be loaded safely.

    Raises:
        ValueError: If an argument is nested too deeply, its anchors multiply without end, or it has
            a NUL character.
    """
    name = ""
    for argument in arguments:
        if "\0" in argument:
            raise ValueError(
                f"Expected the command line to have no NUL characters but got {argument!a}."
            )
        value = argument
        if argument.startswith("-"):
            name, _, value = argument.lstrip("-").partition("=")
        try:
            _check_text_within(value)
        except UnsafeError as error:
            raise ValueError(
                f"Expected argument `{name}` to be short YAML but {reason(error)}."
            ) from None


def _check_text_within(text: str) -> None:
    """Raise ``UnsafeError`` for YAML within a scalar that would take too long to load."""
    if not text.lstrip().startswith(("[", "{", "&")):
        return
    try:
        check_yaml(text)
    except UnsafeError:
        raise
    except yaml.YAMLError:
        return


def check_values(config: Any) -> None:
    """Check numbers and texts that are invalid for every argument of a config.

    NaN is always invalid. Infinity is invalid for optimizers and their schedules. Other classes
    check their own arguments, because some take infinity, for example FedTilt's tilts.

    Args:
        config: The config as nested dictionaries and lists.

    Raises:
        ValueError: If a number is NaN, too large for 64 bits, or infinite in an optimizer or a
            schedule; if a text has a NUL character or is no UTF-8; or if an argument that needs a
            value is null.
    """
    _check_federation_sections(config.get("federation") or {})
    for section, class_path in _CLASSES.items():
        _check_null_arguments(class_path, config.get(section), section)
    _check_nulls(config, "")
    for path, value in _values(config, "", False):
        if isinstance(value, str):
            _check_string(path, value)
        elif isinstance(value, float) and math.isnan(value):
            raise ValueError(f"Expected argument `{path}` to be a number but got NaN.")
        elif isinstance(value, int) and not -_MAX_INTEGER - 1 <= value <= _MAX_INTEGER:
            raise ValueError(
                f"Expected argument `{path}` to be an integer of at most 64 bits, up to 2^63 - 1,"
                f" but got {value if value.bit_length() < 128 else 'a longer one'}."
            )


def _check_federation_sections(federation: Any) -> None:
    """Raise ``ValueError`` if a section of the federation is null."""
    for name in FEDERATION_SECTIONS:
        section = federation.get(name, {})
        if not isinstance(section, dict):
            got = "null" if section is None else section
            raise ValueError(
                f"Expected argument `federation.{name}` to be a mapping of arguments but got {got}:"
                " leave it out for its defaults."
            )


def _check_nulls(config: Any, path: str) -> None:
    """Raise ``ValueError`` if an argument is null whose type and default do not allow null."""
    if isinstance(config, list):
        for index, inner in enumerate(config):
            _check_nulls(inner, f"{path}[{index}]")
    if not isinstance(config, dict):
        return
    class_path, arguments = str(config.get("class_path")), config.get("init_args")
    _check_null_arguments(class_path, arguments, f"{path}.init_args")
    for name, inner in config.items():
        _check_nulls(inner, f"{path}.{name}" if path else str(name))


def _check_null_arguments(class_path: str, arguments: Any, path: str) -> None:
    """Raise ``ValueError`` if an argument of a class is null and needs a value."""
    for name, value in arguments.items() if isinstance(arguments, dict) else ():
        kind = None if value is not None else _needed_type(class_path, name)
        if kind:
            raise ValueError(
                f"Expected argument `{path}.{name}` to be of type {kind} but got null."
            )


def _needed_type(class_path: str, name: str) -> str:
    """Return the type of a class's argument that must not be null; empty if it may be null."""
    module, _, class_name = class_path.rpartition(".")
    kind = getattr(sys.modules.get(module), class_name, None)
    for base in inspect.getmro(kind) if inspect.isclass(kind) else ():
        parameter = _parameters(base).get(name)
        if parameter is not None:
            is_unknown = parameter.annotation is parameter.empty or parameter.default is None
            return "" if is_unknown else " or ".join(_type_names(parameter.annotation))
    return ""


@cache
def _parameters(kind: type) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a class by name; a config has dozens that are null."""
    return inspect.signature(kind).parameters


def _type_names(annotation: Any) -> list[str]:
    """Return the names of the types in an annotation; none if it allows null, or is no type.

    Callables have checks of their own, with examples in the message.
    """
    is_union = get_origin(annotation) in (Union, UnionType)
    kinds = get_args(annotation) if is_union else (annotation,)
    types = [get_origin(kind) or kind for kind in kinds]  # Sequence of Sequence[int]
    if {type(None), Callable} & {*types} or not all(isinstance(kind, type) for kind in types):
        return []
    return [kind.__name__ for kind in types]


def _check_string(path: str, value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(
            f"Expected argument `{path}` to be text in UTF-8 but got {value!a}."
        ) from None
    if "\0" in value:
        raise ValueError(
            f"Expected argument `{path}` to be text without NUL characters but got {value!a}."
        )


def _values(value: Any, path: str, of_optimizer: bool) -> Iterator[tuple[str, Any]]:
    """Yield the paths and the values of a config's scalars."""
    if isinstance(value, dict):
        of_optimizer = of_optimizer or _is_optimizer(value)
        if str(value.get("class_path")).startswith("typing."):  # jsonargparse's for an empty path
            raise ValueError(
                f"Expected argument `{path}` to name a class by its `class_path` but got none."
            )
        for name, inner in value.items():
            yield from _values(inner, f"{path}.{name}" if path else str(name), of_optimizer)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _values(inner, f"{path}[{index}]", of_optimizer)
    elif of_optimizer and isinstance(value, float) and math.isinf(value):
        raise ValueError(f"Expected argument `{path}` to be a finite number but got {value}.")
    else:
        yield path, value


def _is_optimizer(value: dict[str, Any]) -> bool:
    """Return whether a class in a config is an optimizer or a learning rate schedule."""
    path = str(value.get("class_path"))
    return path.startswith(("torch.optim.", "pl_fed.optimizers.")) or "ReduceLROnPlateau" in path


class _NodeChecker:
    """Checks every node of a text once, and refuses nodes that cannot become values."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, int]] = {}  # checked nodes → (number of values, depth)
        self._above: set[int] = set()  # the ancestors of the current node

    def visit(self, node: Node) -> tuple[int, int]:
        """Check a node; return its number of values, with all copies, and its depth."""
        if id(node) in self._above:
            _refuse_unsafe("an anchor contains itself", node)
        if id(node) not in self._sizes:
            self._above.add(id(node))
            _check_node(node)
            sizes = [self.visit(child) for child in _children(node)]
            self._above.remove(id(node))
            count = 1 + sum(size for size, _ in sizes)
            depth = 1 + max((depth for _, depth in sizes), default=0)
            self._sizes[id(node)] = (count, depth)
            if count > len(self._sizes) + _MAX_COPIES:
                _refuse_unsafe(f"its anchors are repeated more than {_MAX_COPIES} times", node)
            if depth > _MAX_DEPTH:
                _refuse_unsafe(f"it is nested more than {_MAX_DEPTH} levels deep", node)
        return self._sizes[id(node)]


def _check_node(node: Node) -> None:
    """Refuse a node with an invalid tag, key or scalar; does not check its children."""
    if node.tag not in _STANDARD:
        _refuse(f"tags are not allowed, but it has {node.tag}", node)
    if isinstance(node, MappingNode):
        _check_keys(node)
    elif isinstance(node, ScalarNode):
        _check_text_within(node.value)
        if node.tag == _INTEGER and len(node.value) > _MAX_DIGITS:
            _refuse("an integer has more digits than 64 bits can hold", node)


def _children(node: Node) -> list[Node]:
    if isinstance(node, MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, SequenceNode) else []


def _check_keys(node: MappingNode) -> None:
    """Refuse duplicate keys, and keys that are neither names nor integers."""
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if key.tag == _MERGE:
            continue
        if key.tag not in (_STRING, _INTEGER):
            _refuse(f"a key should be a name, but it has {_describe_key(key)}", key)
        if key.value in lines:
            raise ConfigError(
                f"`{key.value}` appears twice in one section (lines {lines[key.value]} and"
                f" {key.start_mark.line + 1})"
            )
        lines[key.value] = key.start_mark.line + 1


def _check_sections(root: MappingNode) -> None:
    """Refuse numbers as names of sections or arguments, and a section within itself."""
    for key, value in root.value:
        if key.tag == _INTEGER:
            _refuse(f"a section should have a name, but it has the number {key.value}", key)
        for inner, _ in value.value if isinstance(value, MappingNode) else []:
            if inner.tag == _INTEGER:
                _refuse(f"an argument should have a name, but {key.value} has {inner.value}", inner)
            if inner.value == key.value and key.value in SECTIONS:
                _refuse(f"the section `{key.value}` contains itself", inner)
        if key.value in SECTIONS and not (
            isinstance(value, MappingNode) or value.tag in (_NULL, _STRING)
        ):
            content = "a class_path" if key.value == "model" else "arguments by name"
            _refuse(f"the section `{key.value}` should hold {content}", value)


def _describe_key(key: Node) -> str:
    if not isinstance(key, ScalarNode):
        return "a list or mapping"
    kinds = {"null": "empty key", "bool": "truth value", "float": "number"}
    return f"the {kinds.get(key.tag.rpartition(':')[2], 'key')} {key.value!r}"


def _refuse(fault: str, node: Any) -> NoReturn:
    raise ConfigError(f"{fault} (line {node.start_mark.line + 1})")


def _refuse_unsafe(fault: str, node: Any) -> NoReturn:
    raise UnsafeError(f"{fault} (line {node.start_mark.line + 1})")
