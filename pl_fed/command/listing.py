"""``python -m pl_fed list KIND``: one line for each class or config; imports neither of them."""

import ast
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pl_fed.command.messages import suggest_name
from pl_fed.command.shipped_configs import find_configs
from pl_fed.text import escape_controls

_PACKAGE = Path(__file__).parents[1]
_CONFIGS = "configs"


@dataclass(frozen=True)
class Room:
    """Room: a folder of the package with the classes for one argument.

    Attributes:
        name: The folder.
        bases: The names of the base classes, which are not listed themselves.
        option: The option that takes such a class, and an example.
    """

    name: str
    bases: tuple[str, ...]
    option: str

    def write_option(self, name: str) -> str:
        """Return the option with a class in place of the example."""
        return re.sub(r"\w+$", name, self.option)

    def summaries(self) -> dict[str, str]:
        """Return the first line of the docstring of each class that can be made, by name."""
        names = [name for name in self._exported if name in self._classes]
        return {
            name: _strip_name(name, _first_line(self._classes[name]))
            for name in sorted(names, key=str.lower)
            if self._derives(name) and not self._abstract_methods(name)
        }

    @cached_property
    def _exported(self) -> list[str]:
        init = ast.parse((_PACKAGE / self.name / "__init__.py").read_text(encoding="utf-8"))
        imports = [node for node in init.body if isinstance(node, ast.ImportFrom)]
        return [alias.name for node in imports for alias in node.names]

    @cached_property
    def _classes(self) -> dict[str, ast.ClassDef]:
        return {
            node.name: node
            for path in sorted((_PACKAGE / self.name).glob("*.py"))
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ClassDef)
        }

    def _parents(self, name: str) -> Iterator[str]:
        """Yield the names of the direct base classes."""
        for base in self._classes[name].bases if name in self._classes else ():
            yield ast.unparse(base).split("[")[0].split(".")[-1]

    def _derives(self, name: str) -> bool:
        """Return whether a class derives from one of the base classes, and is none of them."""
        is_child = any(base in self.bases or self._derives(base) for base in self._parents(name))
        return is_child and name not in self.bases

    def _abstract_methods(self, name: str) -> set[str]:
        """Return the names of the abstract methods that a class inherits or defines."""
        body = self._classes[name].body if name in self._classes else []
        methods = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        attributes = {
            target.id
            for node in body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        abstract = {name for name, method in methods.items() if _is_abstract(method)}
        inherited = {m for base in self._parents(name) for m in self._abstract_methods(base)}
        return (inherited - methods.keys() - attributes) | abstract


ROOMS = {
    "algorithms": Room("clients", ("Client",), "--model Ditto"),
    "attacks": Room("attacks", ("Attack",), "--federation.adversary.attack SignFlipping"),
    "defences": Room("aggregators", ("Aggregator",), "--federation.aggregator Median"),
    "compressors": Room("compressors", ("Compressor",), "--federation.compression TopK"),
    "partitioners": Room("partitioners", ("Partitioner",), "--data.partitioner Dirichlet"),
    "data": Room("data", ("DataSource",), "--data.dataset Digits"),
    "models": Room("models", ("Module",), "--model.net MLP"),
    "samplers": Room("samplers", ("Sampler",), "--federation.sampler Uniform"),
    "skews": Room("skews", ("Skew",), "--data.skew Rotations"),
    "systems": Room("systems", ("Distribution",), "--federation.systems.speed LogNormal"),
}
PRE_AGGREGATORS = Room("aggregators", ("PreAggregator",), "--federation.pre_aggregators+=Clipping")
KINDS = (*ROOMS, _CONFIGS)
_SYNONYMS = {
    "aggregators": "defences",
    "clients": "algorithms",
    "datasets": "data",
    "defenses": "defences",
    "nets": "models",
}


def print_list(arguments: Sequence[str]) -> None:
    """Print the list of a kind.

    Args:
        arguments: Arguments of the command line after ``list``.

    Raises:
        ValueError: If the kind is unknown, or there is not exactly one.
    """
    if len(arguments) != 1:
        got = " ".join(arguments) or "none"
        raise ValueError(f"Expected one kind to list, of {', '.join(KINDS)}, but got {got}.")
    kind = _SYNONYMS.get(arguments[0], arguments[0])
    if kind not in KINDS:
        raise ValueError(
            f"Expected a kind to list, one of {', '.join(KINDS)}, but got"
            f" {kind}{suggest_name(kind, KINDS)}."
        )
    for line in _config_lines() if kind == _CONFIGS else _class_lines(ROOMS[kind]):
        print(escape_controls(line, sys.stdout.encoding or "utf-8"))


def find_option(name: str) -> str | None:
    """Return the option that takes a class of pl_fed, or the config with a name in lower case.

    Example:
        >>> find_option("Clipping"), find_option("FedAdam"), find_option("Clip")
        ('--federation.pre_aggregators+=Clipping', '--config fedadam', None)
    """
    for room in (*ROOMS.values(), PRE_AGGREGATORS):
        if name in room.summaries():
            return room.write_option(name)
    return f"--config {name.lower()}" if name.lower() in find_configs() else None


def _class_lines(room: Room) -> Iterator[str]:
    """Yield the lines for the classes of a room; pre-aggregators come behind the aggregators."""
    option, example = re.split(r" |\+=", room.option)
    yield from _align(room.summaries())
    yield ""
    yield f"Use one with {room.option}. Its options: fit {option}.help {example}"
    if room is ROOMS["defences"]:
        yield ""
        yield from _class_lines(PRE_AGGREGATORS)


def _config_lines() -> Iterator[str]:
    """Yield the lines for the configs."""
    yield from _align({name: describe_config(path) for name, path in find_configs().items()})
    yield ""
    yield "Use one with --config quickstart; a later --config changes an earlier one."


def _align(summaries: dict[str, str]) -> Iterator[str]:
    """Yield lines of names and texts; a terminal gets lines of its width."""
    width = max(map(len, summaries), default=0)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for name, text in summaries.items():
        line = f"{name:{width}}  {text}"
        yield line if len(line) <= columns else f"{line[: columns - 1].rstrip(' ,;:')}…"


def describe_config(path: Path) -> str:
    """Return the first sentence of the comment of a config, after the lines with its commands."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next((place for place, line in enumerate(lines) if line[:1] != "#"), len(lines))
    words = [line.removeprefix("#").strip() for line in lines[:end] if "-m pl_fed " not in line]
    return re.split(r"(?<=[.?])(?<! al[.])\s+", " ".join(words).strip())[0]


def _is_abstract(method: ast.FunctionDef) -> bool:
    return "abstractmethod" in map(ast.unparse, method.decorator_list)


def _first_line(node: ast.ClassDef) -> str:
    """Return the first line of a docstring without marks of reStructuredText."""
    line = (ast.get_docstring(node) or "").split("\n", 1)[0]
    return re.sub(r":\w+:(?=`)|`", "", line)


def _strip_name(name: str, text: str) -> str:
    """Return a summary without the name of its class at the start.

    Example:
        >>> _strip_name("MinMax", "Min-max: the upload furthest from the mean.")
        'The upload furthest from the mean.'
        >>> _strip_name("IID", "Independent and identically distributed.")
        'Independent and identically distributed.'
    """
    title, colon, description = text.partition(": ")
    is_name = re.sub(r"\W", "", title).lower() == name.lower()
    text = description if colon and is_name else text
    is_plain = text.split(" ", 1)[0].islower()  # not pFedMe
    return text[:1].upper() + text[1:] if is_plain else text
