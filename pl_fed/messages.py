"""What the command line says of a mistake: one sentence."""

import difflib
import inspect
import re
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

_WRAPPER = re.compile(r"Type typing\.Callable\[.*?\] expects a function or a callable class: ")
_KEY = re.compile(r'Parser key "(.+?)":')
_OWNER = re.compile(r"Problem with given class_path '(.+)':")
_TYPE = re.compile(r"Expected an? (<class '.+'>|typing\..+?)(?:\. Got value: (.*))?$")
_VALUE = re.compile(r"Given value: (.*?)(?:\. Got value: .*)?$")
_CLASS_PATH = re.compile(r"Got value: Namespace\(class_path='(.+?)'")
_MAKER = "default_class_instantiator"  # the function of jsonargparse that calls a class
_COMMANDS = "fit, validate, test, predict, partition, report, export"
_LEAVES = {
    r"Expected a dot import path string: (.+)": (
        "Expected argument `{where}` to be the path of a class but got {0}."
    ),
    r"(No module named .+)": "Expected argument `{where}` to be the path of a class but got: {0}.",
    r"Import path (?:(\S+) )?does not correspond to a subclass of (.+)": (
        "Expected argument `{where}` to be a subclass of {1} but got {0}."
    ),
    r"(?:Subcommand .+ option|unrecognized arguments:) '?(.+?)'?$": (
        "Expected only options that --help lists but got {0}."
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
    r"(?:File does not exist|Path is not a file): (.+)": (
        "Expected argument `{where}` to be a file but found none at {0}."
    ),
}
_FEW = 12  # names that fit into a sentence
_BESIDE_THE_POINT = (
    "Expected a <class 'NoneType'>",
    "Expected a path but ",
    "Not a valid subclass",
)


def sentence(message: str) -> str:
    """Return what matters in an error message of jsonargparse, as one sentence.

    An argument may be of several types, and jsonargparse tells why each of them failed, in a tree:
    the first that is neither ``None`` nor a path is what the user meant. A message of pl_fed's own
    within the tree, or without one, is returned as it is.

    Example:
        >>> print(sentence("unrecognized arguments: --data.size=9"))
        Expected only options that --help lists but got --data.size=9.
    """
    keys: list[str] = []
    owner = ""
    types: list[str] = []
    lines = _WRAPPER.sub("", message).splitlines()
    given = next((found[1] for line in lines if (found := _VALUE.match(line.strip()))), "")
    for line in (each.strip().removeprefix("- ") for each in lines):
        if found := _KEY.match(line):
            keys.append(found[1])
            line = line[found.end() :].strip()
        if found := _OWNER.match(line):
            owner = found[1]
        elif line.startswith(_BESIDE_THE_POINT):
            continue
        elif found := _TYPE.match(line):
            types.append(found[1])
            if found[2] is not None:
                return _wrong_type(keys, types, found[2])
        elif types and (found := _VALUE.match(line)):
            return _wrong_type(keys, types, found[1])
        elif not types and (text := _of_leaf(line, ".init_args.".join(keys), owner, given)):
            return text
    return " ".join(message.split())


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


def wrong_config(path: str | Path) -> str:
    """Return what is wrong with a file that should be a config, if it is no mapping in YAML."""
    try:
        config = yaml.safe_load(Path(path).read_text())
    except yaml.MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f" (line {error.problem_mark.line + 1})"
        return f"{error.problem}{where}"
    except (OSError, ValueError, yaml.YAMLError) as error:
        return " ".join(str(error).split())
    if config is None:
        return "it is empty"
    return "" if isinstance(config, dict) else f"it holds a {type(config).__name__}"


def _of_leaf(line: str, where: str, owner: str, given: str) -> str:
    """Return the sentence of a line that tells what is wrong; of another line, nothing."""
    for pattern, template in _LEAVES.items():
        if found := re.match(pattern, line):
            named = [each or given for each in found.groups()]
            return template.format(*named, where=where)
    if found := re.match(r"Expected an instantiatable class, but (?:(\S+) )?is abstract", line):
        path = found[1] or given
        return (
            f"Expected argument `{where}` to name a class that can be made, by its `class_path`,"
            f" but {path} is abstract{_missing(path)}."
        )
    if found := re.match(r"Option '(.+?)' is not accepted", line):
        callable_class = _CLASS_PATH.search(line)
        owner = callable_class[1] if callable_class else owner
        options = _options(owner)
        near = _near(found[1], options) or _few(options)
        whose = f" of {owner}" if owner else ""
        return (
            f"Expected argument `{where}` to hold only options{whose} but got `{found[1]}`{near}."
        )
    if found := re.match(r"module '(.+?)' has no attribute '(.+?)'", line):
        near = _near(found[2], dir(import_module(found[1])))
        return f"Expected argument `{where}` to be a class but {found[1]} has no {found[2]}{near}."
    if found := re.match(r"the following arguments are required: (.+)", line):
        names = [
            re.sub(r"^(fit|validate|test|predict)\.", "", each) for each in found[1].split(", ")
        ]
        missing = " and ".join(f"`{where}.init_args.{n}`" if where else f"`{n}`" for n in names)
        return f"Expected argument {missing} to be given but got none."
    return line if line.startswith("Expected ") else ""


def _wrong_type(keys: list[str], types: list[str], value: str) -> str:
    literals = re.findall(r"Literal\[(.+?)\]", " ".join(types))
    classes = re.findall(r"<class '(?:.+?\.)?(\w+)'>", " ".join(types))
    kinds = [f"one of {', '.join(literals)}"] if literals else []
    if classes:
        kinds.append(f"of type {' or '.join(dict.fromkeys(classes))}")
    where = ".init_args.".join(keys)
    return f"Expected argument `{where}` to be {', or '.join(kinds)} but got {value}."


def _options(owner: str) -> list[str]:
    """Return the names of the arguments that a class takes, given its path."""
    try:
        made = _imported(owner)
        classes = [each for each in made.__mro__ if "__init__" in vars(each)]
        names = [name for each in classes for name in inspect.signature(each.__init__).parameters]
        return [name for name in names if name not in ("self", "args", "kwargs")]
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
