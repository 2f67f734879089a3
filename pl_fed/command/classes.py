"""Classes in a config: found by name or dotted path, or refused with a similar name."""

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from pl_fed.command.layers import refuse
from pl_fed.command.listing import find_option
from pl_fed.command.messages import shorten, suggest_name
from pl_fed.command.parser import RefusalError


def public_path(kind: type) -> str:
    """Return the path of a class: from the package of its module, if that exports it."""
    package = kind.__module__.rpartition(".")[0]
    is_exported = getattr(sys.modules.get(package), kind.__name__, None) is kind
    return f"{package if is_exported else kind.__module__}.{kind.__qualname__}"


def list_classes(bases: tuple[type, ...]) -> str:
    """Return the names of classes as a text."""
    return " or ".join(base.__name__ for base in bases)


def find_class(name: str, bases: tuple[type, ...], path: str) -> type | None:
    """Return the class with a name or path; ``None`` if a function may build one."""
    if "." in name:
        found: Any = _import(name, path)
    else:
        kinds = {kind.__name__: kind for base in bases for kind in _subclasses(base)}
        if name not in kinds:
            names = [other for other, kind in kinds.items() if not inspect.isabstract(kind)]
            is_beginning = any(other.lower().startswith(name.lower()) for other in names)
            option = None if is_beginning else find_option(name)
            suggestion = f": use it with {option}" if option else suggest_name(name, names)
            refuse(path, "be the path of a class", f"{shorten(name)}{suggestion}")
        found = kinds[name]
    if inspect.isfunction(found):
        found = inspect.signature(found).return_annotation
        if isinstance(found, str):
            return None
    if not (isinstance(found, type) and issubclass(found, bases)):
        refuse(path, f"be a subclass of {list_classes(bases)}", name)
    if inspect.isabstract(found):
        methods = " and no ".join(sorted(vars(found)["__abstractmethods__"]))
        raise RefusalError(
            f"Expected argument `{path}` to name a class that can be made, by its `class_path`, but"
            f" {name} is abstract: it has no {methods}."
        )
    kind: type = found
    return kind


def _subclasses(base: type) -> Iterator[type]:
    """Yield a class and its imported subclasses."""
    yield base
    children: list[type] = base.__subclasses__()
    for child in children:
        yield from _subclasses(child)


def _import(name: str, path: str) -> Any:
    """Return the object at a dotted path."""
    parts, found = name.split("."), None
    if not all(part.isidentifier() for part in parts):
        refuse(path, "be the path of a class", shorten(name))
    for position, part in enumerate(parts):
        module, parent = ".".join(parts[: position + 1]), ".".join(parts[:position])
        try:
            found = getattr(found, part) if hasattr(found, part) else import_module(module)
        except Exception as error:
            if not isinstance(error, ModuleNotFoundError) or error.name != module:
                fault = f"the import of {module} failed: {type(error).__name__}: {error}"
            elif parent:
                fault = f"{parent} has no {part}{suggest_name(part, dir(found))}"
            else:
                modules = [file.stem for file in Path().glob("*.py")]
                names = ["pl_fed", "torch", "lightning", *modules]
                fault = f"there is no module {part}{suggest_name(part, names)}"
            raise RefusalError(f"Expected argument `{path}` to be a class but {fault}.") from None
    return found
