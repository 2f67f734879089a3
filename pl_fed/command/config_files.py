"""Config files: how YAML is read, and which texts and values are refused with one sentence."""

import inspect
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin

import yaml
from jsonargparse import get_loader
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

SECTIONS = ("model", "data", "federation", "trainer")
FEDERATION_SECTIONS = ("adversary", "engine", "storage")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_DEPTH = 100  # jsonargparse and PyYAML recurse
_MAX_COPIES = 10_000  # values that anchors may add to those that are written
_STRUCTURE = re.compile(r"[\[{&*\n]|: ")  # what only a text has that is more than one scalar
_STRING, _INTEGER = "tag:yaml.org,2002:str", "tag:yaml.org,2002:int"
_STANDARD = tuple(
    f"tag:yaml.org,2002:{name}"
    for name in ("null", "bool", "int", "float", "str", "seq", "map", "timestamp", "merge", "value")
)
_MERGE, _NULL = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:null"
_MAX_INTEGER = 2**63 - 1
_MAX_DIGITS = 100  # in any notation


class ConfigError(yaml.YAMLError):
    """A text that is no config, with the reason."""


class UnsafeError(ConfigError):
    """A text that would take too long to load, or never end."""


def read_text(path: str | Path) -> str:
    """Return the text of a file in UTF-8.

    Raises:
        ConfigError: If it cannot be read, or has another encoding.
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


def wrong_config(path: str | Path) -> str:
    """Return what is wrong with a file that should be a config; nothing if it is one."""
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
    r"""Return what PyYAML says of a text, in one line.

    Example:
        >>> try:
        ...     check_yaml("a: 1\na: 2")
        ... except yaml.YAMLError as error:
        ...     print(reason(error))
        `a` stands twice in one section (lines 1 and 2)
    """
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    mark = error.problem_mark or error.context_mark
    line = "" if mark is None else f" (line {mark.line + 1})"
    return f"{error.problem or error.context}{line}"


def check_yaml(text: str) -> Node | None:
    """Return the nodes of a text, of which nothing is made.

    Raises:
        yaml.YAMLError: If it is no YAML, is nested too deeply, has anchors that hold themselves or
            multiply without end, or has a key twice, or one that is no name.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            _refuse_unsafe(f"it is nested more than {_MAX_DEPTH} levels deep", event)
    root: Node | None = yaml.compose(text, Loader=_LOADER)
    if root is not None:
        _Walk().visit(root)
    return root


def fill_empty_sections(text: str) -> str:
    r"""Return the text of a config in which a section without any line is an empty mapping.

    All its arguments then have their defaults, as when the section is left out.

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


def load(text: str) -> Any:
    """Load YAML as jsonargparse does, after :func:`check_yaml`.

    Raises:
        yaml.YAMLError: If the text is refused.
    """
    if _STRUCTURE.search(text):
        check_yaml(text)
    return get_loader("yaml")(text)


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse a command line with an argument that cannot be loaded safely.

    Raises:
        ValueError: If it is nested too deeply, its anchors multiply without end, or it has NUL.
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
    """Refuse YAML within a scalar only if it would take too long to load."""
    if not text.lstrip().startswith(("[", "{", "&")):
        return
    try:
        check_yaml(text)
    except UnsafeError:
        raise
    except yaml.YAMLError:
        return


def check_values(config: Any) -> None:
    """Refuse numbers and texts that no argument of a config can mean.

    NaN is refused everywhere. Infinity is refused for optimizers and their schedules; elsewhere,
    some arguments take it, as FedTilt's tilts do, and each class checks its own.

    Args:
        config: The config as nested dictionaries and lists.

    Raises:
        ValueError: If a number is NaN, too large for 64 bits or infinite where that has no meaning;
            if a text has NUL or half a character; or if an argument is null that needs a value.
    """
    _check_federation_sections(config.get("federation") or {})
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
    """Refuse null for a section of the federation."""
    for name in FEDERATION_SECTIONS:
        if federation.get(name, {}) is None:
            raise ValueError(
                f"Expected argument `federation.{name}` to be a mapping of arguments but got null:"
                " leave it out for its defaults."
            )


def _check_nulls(config: Any, path: str) -> None:
    """Refuse null for arguments of classes whose types and defaults do not allow it."""
    if isinstance(config, list):
        for index, inner in enumerate(config):
            _check_nulls(inner, f"{path}[{index}]")
    if not isinstance(config, dict):
        return
    arguments = config.get("init_args")
    for name, value in arguments.items() if isinstance(arguments, dict) else ():
        kind = None if value is not None else _needed_type(str(config.get("class_path")), name)
        if kind:
            raise ValueError(
                f"Expected argument `{path}.init_args.{name}` to be of type {kind} but got null."
            )
    for name, inner in config.items():
        _check_nulls(inner, f"{path}.{name}" if path else str(name))


def _needed_type(class_path: str, name: str) -> str:
    """Return the type of a class's argument if that may not be null; else nothing."""
    module, _, class_name = class_path.rpartition(".")
    made = getattr(sys.modules.get(module), class_name, None)
    for kind in inspect.getmro(made) if inspect.isclass(made) else ():
        parameter = inspect.signature(kind).parameters.get(name)
        if parameter is not None:
            kinds = _members(parameter.annotation)
            unknown = parameter.annotation is parameter.empty or not kinds
            if unknown or parameter.default is None or type(None) in kinds:
                return ""
            return " or ".join(kind.__name__ for kind in kinds)
    return ""


def _members(annotation: Any) -> list[type]:
    """Return the types that an annotation names; none if one of them is no plain type."""
    is_union = get_origin(annotation) in (Union, UnionType)
    kinds = get_args(annotation) if is_union else (annotation,)
    return list(kinds) if all(isinstance(kind, type) for kind in kinds) else []


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
    """Yield the scalars of a config, each with its path."""
    if isinstance(value, dict):
        of_optimizer = of_optimizer or _is_optimizer(value)
        if str(value.get("class_path")).startswith("typing."):  # jsonargparse's, of an empty one
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
    """Whether a class with its arguments is an optimizer or a schedule of learning rates."""
    path = str(value.get("class_path"))
    return path.startswith(("torch.optim.", "pl_fed.optimizers.")) or "ReduceLROnPlateau" in path


class _Walk:
    """Visits each node of a text once, and refuses nodes that cannot become values."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, int]] = {}  # of nodes seen: values in it, and its depth
        self._above: set[int] = set()  # the nodes around the one that is visited

    def visit(self, node: Node) -> tuple[int, int]:
        """Return how many values a node holds, with all its copies, and how deep it is."""
        if id(node) in self._above:
            _refuse_unsafe("its anchor stands within what it names", node)
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
    """Refuse one node for what itself says, not for what it holds."""
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
    """Refuse keys that stand twice, and keys that are neither names nor integers."""
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if key.tag == _MERGE:
            continue
        if key.tag not in (_STRING, _INTEGER):
            _refuse(f"a key should be a name, but it has {_described(key)}", key)
        if key.value in lines:
            raise ConfigError(
                f"`{key.value}` stands twice in one section (lines {lines[key.value]} and"
                f" {key.start_mark.line + 1})"
            )
        lines[key.value] = key.start_mark.line + 1


def _check_sections(root: MappingNode) -> None:
    """Refuse keys of sections that are numbers, and a section within itself."""
    for key, value in root.value:
        if key.tag == _INTEGER:
            _refuse(f"a section should have a name, but it has the number {key.value}", key)
        for inner, _ in value.value if isinstance(value, MappingNode) else []:
            if inner.tag == _INTEGER:
                _refuse(f"an argument should have a name, but {key.value} has {inner.value}", inner)
            if inner.value == key.value and key.value in SECTIONS:
                _refuse(f"the section `{key.value}` stands within itself", inner)
        if key.value in SECTIONS and not (
            isinstance(value, MappingNode) or value.tag in (_NULL, _STRING)
        ):
            held = "a class_path" if key.value == "model" else "arguments by name"
            _refuse(f"the section `{key.value}` should hold {held}", value)


def _described(key: Node) -> str:
    if not isinstance(key, ScalarNode):
        return "a list or mapping"
    kinds = {"null": "empty key", "bool": "truth value", "float": "number"}
    return f"the {kinds.get(key.tag.rpartition(':')[2], 'key')} {key.value!r}"


def _refuse(why: str, at: Any) -> NoReturn:
    raise ConfigError(f"{why} (line {at.start_mark.line + 1})")


def _refuse_unsafe(why: str, at: Any) -> NoReturn:
    raise UnsafeError(f"{why} (line {at.start_mark.line + 1})")
