"""Faster start: packages that a library merely names are imported when it uses them.

``import torchmetrics`` imports torchvision, transformers, parts of scipy and, for its plots,
matplotlib, for metrics that few runs use. That takes longer than PyTorch and Lightning together.
"""

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAMED = {
    "torchmetrics": (
        *("torchvision", "transformers", "scipy.signal", "scipy.optimize", "scipy.ndimage"),
        "torchmetrics.utilities.plot",
    ),
}
"""The packages that each module names, and uses in some of its functions only."""


class LazyName:
    """Lazy name: stands for a name of a module, and imports the module at the first use.

    Args:
        module: The full name of the module.
        name: The name in it.
    """

    def __init__(self, module: str, name: str) -> None:
        self._target = (module, name)

    def _resolve(self) -> Any:
        module, name = self._target
        return getattr(importlib.import_module(module), name)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(self._resolve(), attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object."""
        return self._resolve()(*args, **kwargs)

    def __instancecheck__(self, instance: Any) -> bool:
        """Return whether an object is an instance: not before the class's module is imported."""
        module = sys.modules.get(self._target[0])
        if module is None or isinstance(module, _LazyModule):
            return False
        return isinstance(instance, self._resolve())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the class as a base of another class."""
        return (self._resolve(),)


class _LazyModule(ModuleType):
    """Lazy module: a module whose names are all lazy."""

    __path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return LazyName(self.__name__, name)


class _LazyFinder(MetaPathFinder, Loader):
    """Lazy finder: finds a lazy module for each of some packages, and for their submodules.

    Args:
        packages: The full names of the packages.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the lazy module's specification."""
        if any(name == package or name.startswith(f"{package}.") for package in self._packages):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return _LazyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module's names are made when they are asked for."""


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Quick imports: a context that reduces the time of Lightning's import to a third.

    Packages that are merely named are not imported. Python's garbage collector pauses: it would
    look through all modules again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import_lazily()
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_lazily() -> None:
    """Import torchmetrics without the packages that it merely names.

    If that fails, for example with another release, the next import is the usual one. If a module
    or one of its packages is there already, they stay as they are.
    """
    for module, packages in _NAMED.items():
        if any(name in sys.modules for name in (module, *packages)):
            continue
        try:
            with _lazy_packages(packages):
                importlib.import_module(module)
        except Exception:
            for name in [name for name in sys.modules if f"{name}.".startswith(f"{module}.")]:
                del sys.modules[name]


@contextlib.contextmanager
def _lazy_packages(packages: Sequence[str]) -> Iterator[None]:
    """Let imports find lazy modules; later imports find the packages themselves."""
    finder = _LazyFinder(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        modules = sys.modules.items()
        for name in [name for name, module in modules if isinstance(module, _LazyModule)]:
            lazy = sys.modules.pop(name)
            parent, _, child = name.rpartition(".")
            if vars(sys.modules.get(parent, lazy)).get(child) is lazy:
                delattr(sys.modules[parent], child)
