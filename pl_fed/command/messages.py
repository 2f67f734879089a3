"""What the command line says of a mistake: one sentence."""

import ast
import difflib
import inspect
import re
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

_WRAPPER = re.compile(r"Type typing\.Callable\[.*?\] expects a function or a callable class: ")
_KEY = re.compile(r'Parser key "(.+?)":')
_OWNER = re.compile(r"Problem with given class_path '(.+)':")
_TYPE = re.compile(  # with the end of a number of which jsonargparse cut off the beginning
    r"Expected an? (<class '.+'>|typing\..+?)\d*(?:\. Got value: ?(.*))?$"
)
_VALUE = re.compile(r"Given value: ?(.*?)(?:\. Got value: .*)?$")
_BUILT = re.compile(  # of a class in a Callable
    r"\. Got value: Namespace\((?:init_args=NestedArg\(.*\), )?class_path='(.+?)'.*$"
)
_LOST_NULL = re.compile(  # null that became text on its way to an argument that takes null
    r"Expected a <class 'NoneType'>\n\s*Given value type: <class 'str'>\n\s*Given value: None\b"
)
_NESTED = re.compile(r"NestedArg\(key='.*?', val=(.*)\)$")
_NO_CLASS = re.compile(r"Not a valid subclass of (\w+)(?:\. Got value: (.*))?$")
_MAKER = "default_class_instantiator"  # the function of jsonargparse that calls a class
_COMMANDS = "fit, validate, test, predict, partition, report, export"
_LEAVES = {
    r"Expected a dot import path string: ?(.*)": (
        "Expected argument `{where}` to be the path of a class but got {0}{near}."
    ),
    r"(No module named (?:.+))": (
        "Expected argument `{where}` to be the path of a class but got: {0}{near}."
    ),
    r"Unexpected import path format: (.+)": (
        "Expected argument `{where}` to be the path of a class but got {0}."
    ),
    r"Expected an import path or a subclass spec, but got (.+?)(?:\. Got value: .*)?$": (
        "Expected argument `{where}` to name a class by its `class_path` but got {0}."
    ),
    r"Expected '(.+?)' to be a subclass of (.+?)\.*$": (
        "Expected argument `{where}` to be a subclass of {1} but got {0}."
    ),
    r"(?:argument of|unhashable) type:? '(.+?)'": (
        "Expected argument `{where}` to name a class by its `class_path` but got a class_path of"
        " type {0}."
    ),
    r"'(\w+)' object has no attribute": (
        "Expected argument `{where}` to have a mapping of arguments as `init_args` but got one of"
        " type {0}."
    ),
    r"Import path (?:(\S+) )?does not correspond to a subclass of (.+)": (
        "Expected argument `{where}` to be a subclass of {1} but got {0}."
    ),
    r"Invalid content in sub-config file (.+?): (.+)": (
        "Expected argument `{where}` to be a class or a YAML file that holds one but got {0}: {1}."
    ),
    r"('\S+' codec can't .+)": (
        "Expected argument `{where}` to be text, or the path of a file, in UTF-8 but got: {0}."
    ),
    r"(embedded null byte)": (
        "Expected argument `{where}` to be text without NUL characters but got: {0}."
    ),
    r"Key must be a string, got: (.+?)\.?$": (
        "Expected argument `{where}` to have names as keys but got {0}."
    ),
    r"argument (?:-\w/)?--(\S+): expected one argument": (
        "Expected argument `{0}` to be followed by a value but got none."
    ),
    r"Invalid option \"(.+)\" for --print_config": (
        "Expected argument `print_config` to be one of comments, skip_default or skip_unset but got"
        " {0}."
    ),
    r"--(\S+)\.help: (.+)": (
        "Expected argument `{0}.help` to be followed by the path of a class but got: {1}."
    ),
    r"Unexpected config: (\w+):?$": (
        "Expected argument `config` to be a file of YAML with sections but got one that holds only"
        " an empty {0}."
    ),
    r"unsupported operand type\(s\) for \+: 'int' and 'str'": (
        "Expected argument `{where}` to have names as keys but got a number as a key."
    ),
    r"ambiguous option: ([^=\s]+).* could match ": (
        "Expected only options that --help lists but got {0}, the beginning of several."
    ),
    r"unrecognized arguments: (.+)": "Expected only options that --help lists but got {0}{near}.",
    r"argument subcommand: invalid choice: (.+) \(choose from .+\)": (
        f"Expected a subcommand, one of {_COMMANDS}, but got {{0}}."
    ),
    r"(?i)expected \"subcommand\" to be one of {.+}": (
        f"Expected a subcommand, one of {_COMMANDS}, but got none."
    ),
    r"(-?\d+) is not in bounds, numpy accepts from (\d+) to (\d+)": (
        "Expected argument `seed_everything` to be an integer from {1} to {2} but got {0}."
    ),
    r"(?:File does not exist|Path is not a file): (.+)": (
        "Expected argument `{where}` to be a file but found none at {0}."
    ),
}
_SECTIONS = ["model", "data", "federation", "trainer", "seed_everything", "ckpt_path"]
_MOVED = {  # arguments that stood in the section federation itself: where they are now
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
_FEDERATION_SECTIONS = {
    "adversary": "pl_fed.Adversary",
    "engine": "pl_fed.EngineOptions",
    "storage": "pl_fed.StorageOptions",
}
_FEW = 12  # names that fit into a sentence
_LONGEST = 160  # characters of a value that are shown
_ROOMS = {  # where the classes are that an argument takes
    "model": ("pl_fed.clients",),
    "net": ("pl_fed.models", "torch.nn"),
    "criterion": ("torch.nn",),
    "optimizer": ("torch.optim", "pl_fed.optimizers"),
    "server_optimizer": ("torch.optim", "pl_fed.optimizers"),
    "lr_scheduler": ("torch.optim.lr_scheduler",),
    "dataset": ("pl_fed.data",),
    "partitioner": ("pl_fed.partitioners",),
    "skew": ("pl_fed.skews",),
    "sampler": ("pl_fed.samplers",),
    "aggregator": ("pl_fed.aggregators",),
    "pre_aggregators": ("pl_fed.aggregators",),
    "attack": ("pl_fed.attacks",),
    "attacks": ("pl_fed.attacks",),
    "corruption": ("pl_fed.attacks",),
    "logger": ("lightning.pytorch.loggers",),
    "callbacks": ("lightning.pytorch.callbacks",),
}
_BESIDE_THE_POINT = ("Expected a <class 'NoneType'>", "Expected a path but ")
_INTERNAL = re.compile(  # what only jsonargparse's messages have, and no sentence should
    r"Namespace\(|NestedArg\(|Parser key|Does not validate|Problem with given|Problems parsing|"
    r"Subclass types|<class '|<function|typing\.|Got value:|Given value|object at 0x|Unable to load"
)


def sentence(message: str) -> str:
    """Return what matters in an error message of jsonargparse, as one sentence.

    An argument may be of several types, and jsonargparse tells why each of them failed, in a tree:
    the first that is neither ``None`` nor a path is what the user meant. A message of pl_fed's own
    within the tree, or without one, is returned as it is. Of any other tree, the argument and the
    value are named.

    Example:
        >>> print(sentence("unrecognized arguments: --data.size=9"))
        Expected only options that --help lists but got --data.size=9.
    """
    tree = _Tree(message)
    text = tree.sentence() or " ".join(message.split())
    return tree.fallback() if _INTERNAL.search(text) else text


def printable(text: str) -> str:
    r"""Return a text in which a terminal's control characters, and others unseen, are escaped.

    Example:
        >>> print(printable("é \x1b[31m"))
        é \x1b[31m
    """
    return "".join(
        character if character.isprintable() or character == "\n" else _escaped(character)
        for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


class _Tree:
    """A message of jsonargparse, read line by line.

    Args:
        message: The message.

    Attributes:
        keys: The names of the arguments on the way to the line that is read.
    """

    def __init__(self, message: str) -> None:
        lines = _WRAPPER.sub("", message).splitlines()
        self._lines = [line.strip().removeprefix("- ") for line in lines]
        values = [found[1] for line in self._lines if (found := _VALUE.match(line))]
        self._value = next(iter(values), "")
        self.keys: list[str] = []
        self._owner = ""
        self._types: list[str] = []
        self._no_class = ""
        self._no_section = ""
        self._lost_null = bool(_LOST_NULL.search(message))

    @property
    def where(self) -> str:
        """The path of the argument."""
        return ".init_args.".join(self.keys)

    @property
    def value(self) -> str:
        """The value of the argument, as far as the message has it."""
        try:
            inner = ast.literal_eval(self._value)["init_args"][self.keys[-1]]
        except (ValueError, SyntaxError, TypeError, KeyError, IndexError):
            return self._value
        return str(inner)

    def sentence(self) -> str:
        """Return the sentence of the first line that tells what is wrong; of others, nothing."""
        for line in self._lines:
            if found := _KEY.match(line):
                self._enter(found[1])
                line = line[found.end() :].strip()
            if found := _BUILT.search(line):
                self._owner, line = found[1], line[: found.start()]
            if text := self._read(line):
                return self._of_lost_null() if self._lost_null else text
        return self._no_class or self._no_section

    def _of_lost_null(self) -> str:
        return (
            f"Expected argument `{self.where}` to be set to null in a config file but got null on"
            " the command line, which cannot set null for an argument of a class within a class."
        )

    def fallback(self) -> str:
        """Return a sentence with the argument and the value, and nothing else of the tree."""
        if not self.keys:
            return (
                f"Expected a valid command line but got: {_short(_without_trees(self._lines[0]))}."
            )
        got = f" {_shown(self.value)}" if self.value else f": {self._reason()}"
        return f"Expected argument `{self.where}` to be as --help says but got{got}."

    def _reason(self) -> str:
        """Return the last line that says something without jsonargparse's own words."""
        plain = [line for line in self._lines if line and not _INTERNAL.search(line)]
        return _short(plain[-1]) if plain else "another"

    def _enter(self, key: str) -> None:
        if not self.keys or self.keys[-1] != key:  # jsonargparse names a section twice
            self.keys.append(key)

    def _read(self, line: str) -> str:
        if found := _OWNER.match(line):
            self._owner = found[1]
            return ""
        if line.startswith(_BESIDE_THE_POINT):
            return ""
        if found := re.match(r"Unable to load config ['\"](.*)['\"]$", line):
            self._no_section = (
                f"Expected argument `{self.where}` to be a mapping of arguments, or a YAML file"
                f" that holds one, but got {_short(found[1])}{_moved(self.where)}."
            )
            return ""
        if self._no_section:
            return f"{self._no_section[:-1]}: {line}." if line else ""
        if found := _NO_CLASS.match(line):
            self._no_class = self._no_class or self._class_expected(found[1], found[2])
            return ""
        if found := _TYPE.match(line):
            self._types.append(found[1])
            return "" if found[2] is None else self._wrong_type(found[2])
        if self._types:
            return self._wrong_type(found[1]) if (found := _VALUE.match(line)) else ""
        return _of_leaf(line, self.where, self._owner, self.value)

    def _class_expected(self, kind: str, value: str | None) -> str:
        got = self.value if value is None else value
        return (
            f"Expected argument `{self.where}` to name a subclass of {kind} by its `class_path` but"
            f" got {_shown(got)}."
        )

    def _wrong_type(self, value: str) -> str:
        literals = re.findall(r"Literal\[(.+?)\]", " ".join(self._types))
        classes = re.findall(r"<class '(?:.+?\.)?(\w+)'>", " ".join(self._types))
        kinds = [f"one of {', '.join(literals)}"] if literals else []
        if classes:
            kinds.append(f"of type {' or '.join(dict.fromkeys(classes))}")
        near = _near_class(self.where, value)
        return (
            f"Expected argument `{self.where}` to be {', or '.join(kinds)} but got"
            f" {_shown(value)}{near}."
        )


def _kind(text: str) -> str:
    """Return the names of classes without their modules; another text is returned as it is.

    Example:
        >>> _kind("<class 'torch.optim.Optimizer'>"), _kind("Union[LRScheduler, Plateau]")
        ('Optimizer', 'LRScheduler or Plateau')
    """
    if found := re.fullmatch(r"Union\[(.+)\]", text):
        return found[1].replace(", ", " or ")
    if text == "NoneType":
        return "null"
    found = re.fullmatch(r"<class '(?:.+\.)?(\w+)'>", text)
    return found[1] if found else text


def _shown(value: str) -> str:
    """Return a value without jsonargparse's own objects.

    Example:
        >>> _shown("Namespace(class_path='torch.optim.SGD', init_args=Namespace(lr=0.1))")
        'torch.optim.SGD'
        >>> _shown("NestedArg(key='lam', val='')")
        "''"
    """
    if found := _NESTED.match(value):
        value = found[1].strip("'")
    if found := re.match(r"Namespace\(class_path='(.+?)'", value):
        value = found[1]
    return _short(_without_trees(value))


def _without_trees(text: str) -> str:
    return _INTERNAL.sub("", text).strip()


def _short(text: str) -> str:
    if not text.strip():
        return repr(text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def of_a_class(error: BaseException) -> str:
    """Return the sentence of an error in the constructor of a class that a config names, if any.

    A refusal, which begins with "Expected", is a sentence already.
    """
    while error.__cause__ is not None and not str(error).startswith("Expected"):
        error = error.__cause__
    frames = list(traceback.walk_tb(error.__traceback__))
    makers = [k for k, (frame, _) in enumerate(frames) if frame.f_code.co_name == _MAKER]
    if not makers or makers[-1] + 1 == len(frames) or str(error).startswith("Expected"):
        return ""
    made = frames[makers[-1]][0].f_locals.get("class_type")
    frame, line = frames[makers[-1] + 1]
    return (
        f"Expected {getattr(made, '__module__', '')}.{getattr(made, '__qualname__', made)} to be a"
        f" class that can be made but got {type(error).__name__}: {' '.join(str(error).split())}"
        f" ({Path(frame.f_code.co_filename).name}, line {line}){_not_given(made, frame.f_locals)}."
    )


def _not_given(made: Any, values: Mapping[str, Any]) -> str:
    """Return which arguments of a class, though without a default, are ``None`` as it is made.

    One without a type, too, is not asked for by jsonargparse, which then gives ``None``.
    """
    try:
        parameters = inspect.signature(made).parameters.values()
    except (TypeError, ValueError):
        return ""
    wanted = [each.name for each in parameters if each.default is each.empty]
    names = [f"`{name}`" for name in wanted if values.get(name, made) is None]
    return f": {' and '.join(names)} was not given" if names else ""


def of_a_file(error: BaseException) -> str:
    """Return the sentence of an error of the system with a file or folder, if it is one.

    Example:
        >>> of_a_file(PermissionError(13, "Permission denied", "runs/a"))
        'Expected to read or write runs/a but got: Permission denied.'
    """
    if not isinstance(error, OSError) or not error.filename or not error.strerror:
        return ""
    return f"Expected to read or write {error.filename} but got: {error.strerror}."


def _of_leaf(line: str, where: str, owner: str, value: str) -> str:
    """Return the sentence of a line that tells what is wrong; of another line, nothing."""
    if where and (found := re.match(r"unrecognized arguments: --([^=\s]+)", line)):
        return _unlisted(found[1], where, owner)
    if found := re.match(r"Subclasses are disabled for (\w+), thus (.+?) is not accepted", line):
        sections = [name for name, path in _FEDERATION_SECTIONS.items() if path.endswith(found[1])]
        return (
            f"Expected argument `{where or '.'.join(['federation', *sections])}` to be a mapping of"
            f" arguments without a class_path but got the class_path {found[2]}."
        )
    for pattern, template in _LEAVES.items():
        if found := re.match(pattern, line):
            groups = [_shown(_kind(value if group is None else group)) for group in found.groups()]
            near = _moved(groups[0]) or _near_class(where, groups[0]) if groups else ""
            return template.format(*groups, where=where, near=near)
    if found := re.match(r"Expected an instantiatable class, but (?:(\S+) )?is abstract", line):
        path = found[1] or value
        return (
            f"Expected argument `{where}` to name a class that can be made, by its `class_path`,"
            f" but {path} is abstract{_missing(path)}."
        )
    if found := re.match(r"(?:Subcommand .+ o|O)ption '(.+?)'(?: is not accepted|$)", line):
        return _unlisted(found[1], where, owner)
    if found := re.match(r"module '(.+?)' has no attribute '(.+?)'", line):
        near = _near(found[2], dir(import_module(found[1])))
        return f"Expected argument `{where}` to be a class but {found[1]} has no {found[2]}{near}."
    if found := re.match(r"the following arguments are required: (.+)", line):
        names = [
            re.sub(r"^(fit|validate|test|predict)\.", "", each) for each in found[1].split(", ")
        ]
        missing = " and ".join(f"`{where}.init_args.{n}`" if where else f"`{n}`" for n in names)
        return f"Expected argument {missing} to be given but got none."
    return line if line.startswith("Expected ") and not _INTERNAL.search(line) else ""


def _unlisted(name: str, where: str, owner: str) -> str:
    """Return the sentence of an option that a class, or the command line, does not have."""
    if not where:
        section = name.partition(".")[0]
        near = _moved(name) or ("" if section in _SECTIONS else _near(section, _SECTIONS))
        return f"Expected only options that --help lists but got {name}{near}."
    options = _options(owner)
    near = _near(name, options) or _few(options)
    whose = f" of {owner}" if owner else ""
    return f"Expected argument `{where}` to hold only options{whose} but got `{name}`{near}."


def _moved(text: str) -> str:
    """Return where an argument of the federation is now, or a similar one of its section.

    Example:
        >>> _moved("--federation.byzantine 0.2"), _moved("federation.engine.chunksize")
        (' (did you mean federation.adversary.fraction?)', ' (did you mean chunk_size?)')
    """
    parts = re.match(r"(?:--)?federation\.(\w+)(?:\.(\w+))?", text)
    if parts is None:
        return ""
    if parts[2] and parts[1] in _FEDERATION_SECTIONS:
        options = _options(_FEDERATION_SECTIONS[parts[1]])
        return _near(parts[2], options) or _few(options)
    moved = _MOVED.get(parts[1])
    return f" (did you mean federation.{moved}?)" if moved else ""


def _near_class(where: str, path: str) -> str:
    """Return the class or module that a wrong path may have meant, among those that fit."""
    if found := re.fullmatch(r"No module named '(.+)'", path):
        return _near(found[1], sorted({room for rooms in _ROOMS.values() for room in rooms}))
    if not path.isidentifier():
        return ""
    rooms = _ROOMS.get(re.sub(r"\[.*", "", where.rpartition(".")[2]), ())
    return _near(path, [name for room in rooms for name in dir(import_module(room))])


def _options(owner: str) -> list[str]:
    """Return the names of the arguments that a class takes, given its path."""
    try:
        made = _imported(owner)
        names: dict[str, None] = {}
        for each in made.__mro__:
            if "__init__" in vars(each):
                parameters = inspect.signature(each.__init__).parameters
                names |= dict.fromkeys(parameters)
                if not any(
                    parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
                ):
                    break
        given_by_others = ["self", "args", "kwargs", "params"]
        if made.__module__.startswith("torch.optim."):  # a schedule, which is built on one
            given_by_others.append("optimizer")
        return [name for name in names if name not in given_by_others]
    except (ImportError, AttributeError, ValueError):
        return []


def _imported(path: str) -> Any:
    """Return a class, given its path."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _missing(path: str) -> str:
    """Return what an abstract class does not have, given its path."""
    try:
        missing = sorted(_imported(path).__abstractmethods__)
    except (ImportError, AttributeError, ValueError):
        return ""
    return f": it has no {' and no '.join(missing)}" if missing else ""


def _near(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _few(names: list[str]) -> str:
    return f" (there are: {', '.join(names)})" if 0 < len(names) <= _FEW else ""
