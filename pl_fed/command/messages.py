"""Error messages: translates errors of jsonargparse, classes and files to one sentence."""

import ast
import difflib
import inspect
import re
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

_WRAPPER = re.compile(r"Type typing\.Callable\[.*?\] expects a function or a callable class: ")
_KEY = re.compile(r'Parser key "(.+?)":')
_OWNER = re.compile(r"Problem with given class_path '(.+)':")
_TYPE = re.compile(  # jsonargparse cuts numbers, so that digits may follow the type
    r"Expected an? (<class '.+'>|typing\..+?)\d*(?:\. Got value: ?(.*))?$"
)
_VALUE = re.compile(r"Given value: ?(.*?)(?:\. Got value: .*)?$")
_CALLABLE_CLASS = re.compile(  # a class as the value of a Callable argument
    r"\. Got value: Namespace\((?:init_args=NestedArg\(.*\), )?class_path='(.+?)'.*$"
)
_LOST_NULL = re.compile(  # null that jsonargparse passed as text to an argument that takes null
    r"Expected a <class 'NoneType'>\n\s*Given value type: <class 'str'>\n\s*Given value: None\b"
)
_NESTED = re.compile(r"NestedArg\(key='.*?', val=(.*)\)$")
_NO_CLASS = re.compile(r"Not a valid subclass of (\w+)(?:\. Got value: (.*))?$")
_UNION = "raise_union_unexpected_value"  # its function that joins the errors of several types
_INSTANTIATOR = "default_class_instantiator"  # jsonargparse's function that calls constructors
SUBCOMMANDS = ("fit", "validate", "test", "predict", "partition", "report", "export", "list")
_COMMANDS = ", ".join(SUBCOMMANDS)
_TEMPLATES = {
    r"Expected a dot import path string: ?(.*)": (
        "Expected argument `{path}` to be the path of a class but got {0}{suggestion}."
    ),
    r"(No module named (?:.+))": (
        "Expected argument `{path}` to be the path of a class but got: {0}{suggestion}."
    ),
    r"Unexpected import path format: (.+)": (
        "Expected argument `{path}` to be the path of a class but got {0}."
    ),
    r"Expected an import path or a subclass spec, but got (.+?)(?:\. Got value: .*)?$": (
        "Expected argument `{path}` to name a class by its `class_path` but got {0}."
    ),
    r"Expected '(.+?)' to be a subclass of (.+?)\.*$": (
        "Expected argument `{path}` to be a subclass of {1} but got {0}."
    ),
    r"(?:argument of|unhashable) type:? '(.+?)'": (
        "Expected argument `{path}` to name a class by its `class_path` but got a class_path of"
        " type {0}."
    ),
    r"'(\w+)' object has no attribute": (
        "Expected argument `{path}` to have a mapping of arguments as `init_args` but got one of"
        " type {0}."
    ),
    r"Import path (?:(\S+) )?does not correspond to a subclass of (.+)": (
        "Expected argument `{path}` to be a subclass of {1} but got {0}."
    ),
    r"Invalid content in sub-config file (.+?): (.+)": (
        "Expected argument `{path}` to be a class or a YAML file that holds one but got {0}: {1}."
    ),
    r"('\S+' codec can't .+)": (
        "Expected argument `{path}` to be text, or the path of a file, in UTF-8 but got: {0}."
    ),
    r"(embedded null byte)": (
        "Expected argument `{path}` to be text without NUL characters but got: {0}."
    ),
    r"Key must be a string, got: (.+?)\.?$": (
        "Expected argument `{path}` to have names as keys but got {0}."
    ),
    r"argument (?:-\w/)?--(\S+): expected one argument": (
        "Expected argument `{0}` to be followed by a value but got none."
    ),
    r"Invalid option \"(.+)\" for --print_config": (
        "Expected argument `print_config` to be one of comments, skip_default or skip_unset but got"
        " {0}."
    ),
    r"--(\S+)\.help: (?:Expected a dot import path string: )?(.+?)\.?$": (
        "Expected argument `{0}.help` to be followed by the path of a class but got:"
        " {1}{suggestion}."
    ),
    r"Unexpected config: (\w+):?$": (
        "Expected argument `config` to be a file of YAML with sections but got one that holds only"
        " an empty {0}."
    ),
    r"unsupported operand type\(s\) for \+: 'int' and 'str'": (
        "Expected argument `{path}` to have names as keys but got a number as a key."
    ),
    r"ambiguous option: ([^=\s]+).* could match ": (
        "Expected only options that --help lists but got {0}, the beginning of several."
    ),
    r"unrecognized arguments: (.+)": (
        "Expected only options that --help lists but got {0}{suggestion}."
    ),
    r"argument subcommand: invalid choice: (.+) \(choose from .+\)": (
        f"Expected a subcommand, one of {_COMMANDS}, but got {{0}}."
    ),
    r"(?i)expected \"subcommand\" to be one of {.+}": (
        f"Expected a subcommand, one of {_COMMANDS}, but got none."
    ),
    r"(-?\d+) is not in bounds, numpy accepts from (\d+) to (\d+)": (
        "Expected argument `seed_everything` to be an integer from {1} to {2} but got {0}."
    ),
    r"You requested to check (\S+) of the `(?:train|val|test|predict)_dataloader`.*": (
        "Expected argument `trainer.overfit_batches`, or the `limit_<stage>_batches` in use, to be"
        " a number of batches, or a share with at least one batch of clients, but got {0}: set, for"
        " example, 1.0."
    ),
    r"No supported gpu backend found!": (
        "Expected argument `trainer.accelerator` to be available here but got gpu: torch finds no"
        " GPU that it can use."
    ),
    r"`(\w+)` can not run on your system since the accelerator is not available.*": (
        "Expected argument `trainer.accelerator` to be available here but got {0}."
    ),
    r"(?:File does not exist|Path is not a file): (.+)": (
        "Expected argument `{path}` to be a file but found none at {0}."
    ),
}
_SECTIONS = ["model", "data", "federation", "trainer", "seed_everything", "ckpt_path"]
_NEW_PATHS = {  # former arguments of the section `federation` → their paths below it
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
_MAX_NAMES = 12  # most names in a sentence
_QUOTES = ": put it in quotes if it is a name, because YAML reads yes, no, on and off as booleans"
_MAX_LENGTH = 160  # most characters of a value
_MODULES = {  # arguments → the modules of their classes
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
_IRRELEVANT = ("Expected a <class 'NoneType'>", "Expected a path but ")
_INTERNAL = re.compile(  # internals of jsonargparse, which no message should show
    r"Namespace\(|NestedArg\(|Parser key|Does not validate|Problem with given|Problems parsing|"
    r"Subclass types|<class '|<function|typing\.|Got value:|Given value|object at 0x|Unable to load"
)


def summarize(message: str) -> str:
    """Summarize an error message of jsonargparse in one sentence.

    If an argument takes several types, jsonargparse lists the failure of each type in a tree. The
    first type that is neither ``None`` nor a path is probably the user's choice. A message of
    pl_fed, in a tree or alone, stays unchanged. If no line of a tree is understood, the sentence
    names the argument and the value.

    Example:
        >>> print(summarize("unrecognized arguments: --data.size=9"))
        Expected only options that --help lists but got --data.size=9.
    """
    tree = _ErrorTree(message)
    text = tree.read() or " ".join(message.split())
    return tree.describe_argument() if _INTERNAL.search(text) else text


def escape_invisible(text: str) -> str:
    r"""Return a text with escaped control and invisible characters, except line breaks.

    Example:
        >>> print(escape_invisible("é \x1b[31m"))
        é \x1b[31m
    """
    return "".join(
        character if character.isprintable() or character == "\n" else _escape(character)
        for character in text
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


class _ErrorTree:
    """Error tree: a message of jsonargparse, read line by line.

    Args:
        message: The message.

    Attributes:
        keys: Names of the nested arguments at the current line, from the outside in.
    """

    def __init__(self, message: str) -> None:
        lines = _WRAPPER.sub("", message).splitlines()
        self._lines = [line.strip().removeprefix("- ") for line in lines]
        values = [match[1] for line in self._lines if (match := _VALUE.match(line))]
        self._value = next(iter(values), "")
        self.keys: list[str] = []
        self._class_path = ""
        self._types: list[str] = []
        self._no_class = ""
        self._no_section = ""
        self._lost_null = bool(_LOST_NULL.search(message))

    @property
    def path(self) -> str:
        """Path of the argument."""
        return ".init_args.".join(self.keys)

    @property
    def value(self) -> str:
        """Value of the argument; empty if the message does not have it."""
        try:
            inner = ast.literal_eval(self._value)["init_args"][self.keys[-1]]
        except (ValueError, SyntaxError, TypeError, KeyError, IndexError):
            return self._value
        return str(inner)

    def read(self) -> str:
        """Translate the first line with a known error; empty if there is none."""
        for line in self._lines:
            if match := _KEY.match(line):
                self._enter(match[1])
                line = line[match.end() :].strip()
            if match := _CALLABLE_CLASS.search(line):
                self._class_path, line = match[1], line[: match.start()]
            if text := self._read_line(line):
                return self._describe_lost_null() if self._lost_null else text
        return self._no_class or self._no_section

    def _describe_lost_null(self) -> str:
        return (
            f"Expected argument `{self.path}` to be set to null in a config file but got null on"
            " the command line, which cannot set null for an argument of a class within a class."
        )

    def describe_argument(self) -> str:
        """Return a sentence that names only the argument and the value."""
        if not self.keys:
            line = _shorten(_strip_internals(self._lines[0]))
            return f"Expected a valid command line but got: {line}."
        got = f" {_describe_value(self.value)}" if self.value else f": {self._reason()}"
        return f"Expected argument `{self.path}` to be as --help says but got{got}."

    def _reason(self) -> str:
        """Return the last line without internals of jsonargparse."""
        plain = [line for line in self._lines if line and not _INTERNAL.search(line)]
        return _shorten(plain[-1]) if plain else "another"

    def _enter(self, key: str) -> None:
        if not self.keys or self.keys[-1] != key:  # jsonargparse repeats the name of a section
            self.keys.append(key)

    def _read_line(self, line: str) -> str:
        """Translate a line, or return an empty text and keep its facts for later lines."""
        if match := _OWNER.match(line):
            self._class_path = match[1]
            return ""
        if line.startswith(_IRRELEVANT):
            return ""
        if match := re.match(r"Unable to load config ['\"](.*)['\"]$", line):
            self._no_section = (
                f"Expected argument `{self.path}` to be a mapping of arguments, or a YAML file"
                f" that holds one, but got {_shorten(match[1])}{_suggest_new_path(self.path)}."
            )
            return ""
        if self._no_section:
            return f"{self._no_section[:-1]}: {line}." if line else ""
        if match := _NO_CLASS.match(line):
            self._no_class = self._no_class or self._expect_class(match[1], match[2])
            return ""
        if match := _TYPE.match(line):
            self._types.append(match[1])
            return "" if match[2] is None else self._describe_wrong_type(match[2])
        if self._types:
            return self._describe_wrong_type(match[1]) if (match := _VALUE.match(line)) else ""
        return _translate_line(line, self.path, self._class_path, self.value)

    def _expect_class(self, kind: str, value: str | None) -> str:
        got = self.value if value is None else value
        return (
            f"Expected argument `{self.path}` to name a subclass of {kind} by its `class_path` but"
            f" got {_describe_value(got)}."
        )

    def _describe_wrong_type(self, value: str) -> str:
        literals = re.findall(r"Literal\[(.+?)\]", " ".join(self._types))
        names = re.findall(r"'(.+?)'", " ".join(literals))
        classes = re.findall(r"<class '(?:.+?\.)?(\w+)'>", " ".join(self._types))
        kinds = [f"one of {', '.join(literals)}"] if literals else []
        if classes:
            kinds.append(f"of type {' or '.join(dict.fromkeys(classes))}")
        suggestion = _suggest_class(self.path, value) or suggest_name(value, names)
        if value in ("True", "False") and "str" in classes:
            suggestion += _QUOTES
        return (
            f"Expected argument `{self.path}` to be {', or '.join(kinds)} but got"
            f" {_describe_value(value)}{suggestion}."
        )


def _class_name(text: str) -> str:
    """Return the names of classes without their modules; any other text unchanged.

    Example:
        >>> _class_name("<class 'torch.optim.Optimizer'>")
        'Optimizer'
        >>> _class_name("Union[LRScheduler, Plateau]")
        'LRScheduler or Plateau'
    """
    if match := re.fullmatch(r"Union\[(.+)\]", text):
        return match[1].replace(", ", " or ")
    if text == "NoneType":
        return "null"
    match = re.fullmatch(r"<class '(?:.+\.)?(\w+)'>", text)
    return match[1] if match else text


def _describe_value(value: str) -> str:
    """Return a value without the objects of jsonargparse around it.

    Example:
        >>> _describe_value("Namespace(class_path='torch.optim.SGD', init_args=Namespace(lr=0.1))")
        'torch.optim.SGD'
        >>> _describe_value("NestedArg(key='lam', val='')")
        "''"
    """
    if match := _NESTED.match(value):
        value = match[1].strip("'")
    if match := re.match(r"Namespace\(class_path='(.+?)'", value):
        value = match[1]
    return _shorten(_strip_internals(value))


def _strip_internals(text: str) -> str:
    return _INTERNAL.sub("", text).strip()


def _shorten(text: str) -> str:
    if not text.strip():
        return repr(text)
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}…"


def describe_constructor_error(error: BaseException) -> str:
    """Describe an error in the constructor of a class from the config; else return an empty text.

    Errors that begin with "Expected" are sentences of pl_fed and need no description.
    """
    found = _find_constructor_error(error)
    if found is None:
        return ""
    error = found
    frames = list(traceback.walk_tb(error.__traceback__))
    makers = _find_constructors(error)
    kind = frames[makers[-1]][0].f_locals.get("class_type")
    frame, line = frames[makers[-1] + 1]
    missing = _describe_missing_arguments(kind, frame.f_locals)
    return (
        f"Expected {getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', kind)} to be a"
        f" class that can be made but got {type(error).__name__}: {' '.join(str(error).split())}"
        f" ({Path(frame.f_code.co_filename).name}, line {line}){missing}."
    )


def _find_constructor_error(error: BaseException) -> BaseException | None:
    """Return the error of a constructor among an error and its causes; ``None`` without one.

    If an argument takes several types, jsonargparse notes the error of each.
    """
    if _is_own_sentence(error):
        return None
    causes: list[BaseException] = [] if error.__cause__ is None else [error.__cause__]
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == _UNION:
            causes = [*frame.f_locals.get("exceptions", causes)]
    for cause in causes:
        if (found := _find_constructor_error(cause)) is not None:
            return found
    return error if _find_constructors(error) else None


def _find_constructors(error: BaseException) -> list[int]:
    """Return the positions of calls of constructors in the traceback of an error."""
    frames = list(traceback.walk_tb(error.__traceback__))[:-1]
    return [k for k, (frame, _) in enumerate(frames) if frame.f_code.co_name == _INSTANTIATOR]


def _is_own_sentence(error: BaseException) -> bool:
    """Return whether an error is a sentence of pl_fed, or of a user's class in its words.

    jsonargparse raises its sentence about a union of types from the error of a constructor.
    """
    if not str(error).startswith("Expected"):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return not str(frame.f_globals.get("__name__")).startswith("jsonargparse")


def _describe_missing_arguments(kind: Any, values: Mapping[str, Any]) -> str:
    """Name the arguments without a default that are ``None`` in a constructor call.

    jsonargparse passes ``None`` for a missing argument that has neither default nor type.
    """
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return ""
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    names = [f"`{name}`" for name in required if values.get(name, kind) is None]
    return f": {' and '.join(names)} was not given" if names else ""


def describe_file_error(error: BaseException) -> str:
    """Describe an operating system error about a file or folder; else return an empty text.

    Example:
        >>> describe_file_error(PermissionError(13, "Permission denied", "runs/a"))
        'Expected to read or write runs/a but got: Permission denied.'
    """
    if not isinstance(error, OSError) or not error.filename or not error.strerror:
        return ""
    return f"Expected to read or write {error.filename} but got: {error.strerror}."


def _translate_line(line: str, path: str, class_path: str, value: str) -> str:
    """Translate one line of jsonargparse; empty if it holds no known error.

    Args:
        line: The line.
        path: Path of the argument; empty for the whole command line.
        class_path: Path of the argument's class; empty if unknown.
        value: Value of the argument; empty if unknown.
    """
    if path and (match := re.match(r"unrecognized arguments: --([^=\s]+)", line)):
        return _describe_unknown_option(match[1], path, class_path)
    if match := re.match(r"Subclasses are disabled for (\w+), thus (.+?) is not accepted", line):
        sections = [name for name, kind in _FEDERATION_SECTIONS.items() if kind.endswith(match[1])]
        return (
            f"Expected argument `{path or '.'.join(['federation', *sections])}` to be a mapping of"
            f" arguments without a class_path but got the class_path {match[2]}."
        )
    for pattern, template in _TEMPLATES.items():
        if match := re.match(pattern, line):
            groups = [
                _describe_value(_class_name(value if group is None else group))
                for group in match.groups()
            ]
            suggestion = ""
            if groups:
                suggestion = _suggest_new_path(groups[0]) or _suggest_class(
                    path or groups[0], groups[-1]
                )
            return template.format(*groups, path=path, suggestion=suggestion)
    if match := re.match(r"Expected an instantiatable class, but (?:(\S+) )?is abstract", line):
        kind = match[1] or value
        return (
            f"Expected argument `{path}` to name a class that can be made, by its `class_path`,"
            f" but {kind} is abstract{_describe_abstract_methods(kind)}."
        )
    if match := re.match(r"(?:Subcommand .+ o|O)ption '(.+?)'(?: is not accepted|$)", line):
        return _describe_unknown_option(match[1], path, class_path)
    if match := re.match(r"module '(.+?)' has no attribute '(.+?)'", line):
        suggestion = suggest_name(match[2], dir(import_module(match[1])))
        return (
            f"Expected argument `{path}` to be a class but {match[1]} has no"
            f" {match[2]}{suggestion}."
        )
    if match := re.match(r"the following arguments are required: (.+)", line):
        names = [re.sub(r"^(fit|validate|test|predict)\.", "", n) for n in match[1].split(", ")]
        missing = " and ".join(f"`{path}.init_args.{n}`" if path else f"`{n}`" for n in names)
        return f"Expected argument {missing} to be set but got none."
    return line if line.startswith("Expected ") and not _INTERNAL.search(line) else ""


def _describe_unknown_option(name: str, path: str, class_path: str) -> str:
    """Return the message for an option that a class, or the command line, does not have."""
    if not path:
        section = name.partition(".")[0]
        suggestion = _suggest_new_path(name)
        if not suggestion and section not in _SECTIONS:
            suggestion = suggest_name(section, _SECTIONS)
        return f"Expected only options that --help lists but got {name}{suggestion}."
    options = option_names(class_path)
    suggestion = suggest_name(name, options) or _list_names(options)
    owner = f" of {class_path}" if class_path else ""
    return f"Expected argument `{path}` to hold only options{owner} but got `{name}`{suggestion}."


def _suggest_new_path(text: str) -> str:
    """Suggest the new path of a former argument of the federation, or a similar argument.

    Example:
        >>> _suggest_new_path("--federation.byzantine 0.2")
        ' (did you mean federation.adversary.fraction?)'
        >>> _suggest_new_path("federation.engine.chunksize")
        ' (did you mean chunk_size?)'
    """
    parts = re.match(r"(?:--)?federation\.(\w+)(?:\.(\w+))?", text)
    if parts is None:
        return ""
    if parts[2] and parts[1] in _FEDERATION_SECTIONS:
        options = option_names(_FEDERATION_SECTIONS[parts[1]])
        return suggest_name(parts[2], options) or _list_names(options)
    path = _NEW_PATHS.get(parts[1])
    return f" (did you mean federation.{path}?)" if path else ""


def _suggest_class(path: str, name: str) -> str:
    """Suggest a class, or a module, with a similar name among those that an argument takes."""
    if match := re.fullmatch(r"No module named '(.+)'", name):
        return suggest_name(match[1], sorted({m for modules in _MODULES.values() for m in modules}))
    if not name.isidentifier():
        return ""
    modules = _MODULES.get(re.sub(r"\[.*", "", path.rpartition(".")[2]), ())
    return suggest_name(name, [name for module in modules for name in _class_names(module)])


def _class_names(module: str) -> list[str]:
    """Return the names of the classes of a module."""
    loaded = import_module(module)
    return [name for name in dir(loaded) if isinstance(getattr(loaded, name), type)]


def option_names(class_path: str) -> list[str]:
    """Return the names of the options of a class; none if it cannot be imported."""
    try:
        kind = _import_class(class_path)
        names: dict[str, None] = {}
        for base in kind.__mro__:
            if "__init__" in vars(base):
                parameters = inspect.signature(base.__init__).parameters
                names |= dict.fromkeys(parameters)
                if not any(
                    parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
                ):
                    break
        not_options = ["self", "args", "kwargs", "params"]
        if kind.__module__.startswith("torch.optim."):  # pl_fed passes a schedule its optimizer
            not_options.append("optimizer")
        return [name for name in names if name not in not_options]
    except (ImportError, AttributeError, ValueError):
        return []


def _import_class(path: str) -> Any:
    """Return the class at a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _describe_abstract_methods(path: str) -> str:
    """Name the methods that the abstract class at a dotted path lacks."""
    try:
        methods = sorted(_import_class(path).__abstractmethods__)
    except (ImportError, AttributeError, ValueError):
        return ""
    return f": it has no {' and no '.join(methods)}" if methods else ""


def suggest_name(name: str, names: Sequence[str]) -> str:
    """Suggest the most similar name in parentheses; empty if none is similar."""
    similar = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {similar[0]}?)" if similar else ""


def _list_names(names: list[str]) -> str:
    """List names in parentheses; empty if there are none or too many."""
    return f" (there are: {', '.join(names)})" if 0 < len(names) <= _MAX_NAMES else ""
