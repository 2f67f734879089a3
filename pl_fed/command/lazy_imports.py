"""Faster start: torchmetrics gets packages that it merely names when it uses them.

``import torchmetrics`` imports torchvision, transformers and parts of scipy, for metrics that few
runs use. That takes longer than PyTorch and Lightning together.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGES = ("torchvision", "transformers", "scipy.signal", "scipy.optimize", "scipy.ndimage")


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
        return self._target[0] in sys.modules and isinstance(instance, self._resolve())

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
    """Lazy finder: finds a lazy module for each package in the list, and its submodules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the lazy module's specification."""
        if any(name == package or name.startswith(f"{package}.") for package in _PACKAGES):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return _LazyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module's names are made when they are asked for."""


def import_torchmetrics() -> None:
    """Import torchmetrics without the packages that it merely names.

    If that fails, for example with another release of torchmetrics, nothing is changed: the next
    import of torchmetrics is the usual one.
    """
    if any(name in sys.modules for name in ("torchmetrics", *_PACKAGES)):
        return
    try:
        with _lazy_packages():
            importlib.import_module("torchmetrics")
    except Exception:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchmetrics"]:
            del sys.modules[name]


@contextlib.contextmanager
def _lazy_packages() -> Iterator[None]:
    """Let imports find lazy modules; later imports find the packages themselves."""
    finder = _LazyFinder()
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
