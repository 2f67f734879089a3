"""The values that a user's classes and files keep outside of objects."""

import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterator
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_fed.nets.fingerprints import LIBRARIES, SCALARS, function_values, package_of

_MAX_FUNCTIONS = 1 << 10
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_PLAIN = (*SCALARS, Tensor, np.ndarray, list, tuple, dict, set, deque, *_GENERATORS)
_CODE = (
    *(type, types.ModuleType, types.BuiltinFunctionType, types.MethodType),
    *(classmethod, staticmethod, property, cached_property),
)


def user_values(*kinds: type) -> Iterator[tuple[str, Any]]:
    """Yield values that classes and files of a user keep outside of objects, by name.

    These are attributes of a class and of its bases, global variables that their methods name, and
    values that functions keep in closures, defaults and attributes. Functions and classes of a
    user's files that methods name are followed; installed packages are not.

    Args:
        kinds: The classes of a user's objects.
    """
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__)
    packages = {base: base.__module__.partition(".")[0] for base in bases}
    walk = _Walk({package for package in packages.values() if package not in LIBRARIES})
    for base, package in packages.items():
        if package not in LIBRARIES:
            yield from walk.class_values(base)


class _Walk:
    """A walk through a user's classes and functions.

    Args:
        own: The packages of the classes with which the walk begins; their code is the user's.
    """

    def __init__(self, own: set[str]) -> None:
        self._own = own
        self._seen: set[int] = set()

    def class_values(self, kind: type) -> Iterator[tuple[str, Any]]:
        """Yield the attributes of a class, and the values of its methods."""
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        for name, value in list(vars(kind).items()):
            for function in _functions(value):
                yield from self._function_values(function)
            if not name.startswith("__") and self._is_data(value):
                yield f"{kind.__qualname__}.{name}", value

    def _function_values(self, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        """Yield the values that a function keeps, and the global variables that it names."""
        if id(function) in self._seen or len(self._seen) >= _MAX_FUNCTIONS:
            return
        self._seen.add(id(function))
        if self._is_users(function.__module__) and _keeps_values(function):
            yield function.__qualname__, function_values(function)
        names = list(_list_names(function.__code__))
        yield from self._find_values(names, function.__module__, function.__globals__)
        for cell in _cell_values(function):
            for inner in _functions(cell):
                yield from self._function_values(inner)

    def _find_values(
        self, names: list[str], module: str, values: dict[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        """Yield the values of a file that the code of a function names."""
        for name in names:
            value = values.get(name)
            if isinstance(value, types.ModuleType):
                if self._is_users(value.__name__) and id(value) not in self._seen:
                    self._seen.add(id(value))
                    yield from self._find_values(names, value.__name__, vars(value))
                    self._seen.discard(id(value))  # another function may name other values
            elif isinstance(value, type):
                if self._is_users(value.__module__):
                    yield from self.class_values(value)
            elif functions := _functions(value):
                for function in functions:
                    if self._is_users(function.__module__):
                        yield from self._function_values(function)
            elif value is not None and self._is_data(value):
                yield f"{module}.{name}", value

    def _is_users(self, module: str | None) -> bool:
        """Return whether a module is the user's: of the package of the class, or not installed."""
        package = (module or "").partition(".")[0]
        return package in self._own or not (package in LIBRARIES or _is_installed(package))

    def _is_data(self, value: Any) -> bool:
        """Return whether a value may hold data: no code, and no object of an installed package."""
        if isinstance(value, _CODE) or _functions(value):
            return False
        package = package_of(value)
        return isinstance(value, _PLAIN) or self._is_users(package) or package in _STANDARD


_STANDARD = frozenset(sys.stdlib_module_names) - LIBRARIES


def _functions(value: Any) -> list[types.FunctionType]:
    """Return the functions of a value that is code: a function, a method, a property, a wrapper."""
    if isinstance(value, types.FunctionType):
        return [value]
    inner: tuple[Any, ...] = ()
    if isinstance(value, property):
        inner = (value.fget, value.fset)
    elif isinstance(value, staticmethod | classmethod | types.MethodType):
        inner = (value.__func__,)
    elif isinstance(value, partial | cached_property):
        inner = (value.func,)
    elif isinstance(value, _LRU):
        inner = (value.__wrapped__,)
    return [function for entry in inner for function in _functions(entry)]


_LRU = type(cache(len))


def _keeps_values(function: types.FunctionType) -> bool:
    """Return whether a function has a closure, defaults or attributes."""
    defaults = function.__defaults__ or function.__kwdefaults__
    return bool(function.__closure__ or defaults or vars(function))


def _list_names(code: types.CodeType) -> Iterator[str]:
    """Yield the names in the code of a function, and of the functions inside of it."""
    yield from (name for name in code.co_names if not name.startswith("__"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _list_names(constant)


def _cell_values(function: types.FunctionType) -> Iterator[Any]:
    """Yield the values of a function's closure."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue


@cache
def _is_installed(package: str) -> bool:
    """Return whether a package is one of Python's own, or lies in the folder of installed ones."""
    if package == "__main__":
        return False
    module = sys.modules.get(package)
    if package in sys.stdlib_module_names or module is None:
        return True
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    folders = [Path(sysconfig.get_paths()[name]) for name in ("purelib", "platlib")]
    return any(folder in Path(place).parents for place in places if place for folder in folders)
