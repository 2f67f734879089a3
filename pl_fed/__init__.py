"""A PyTorch Lightning trainer for federated learning: personalized, fair and robust at once."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pl_fed.federation import Federation as Federation
    from pl_fed.trainer import Trainer as Trainer

__version__ = "0.1.0"
__all__ = ["Federation", "Trainer"]


def __getattr__(name: str) -> Any:
    """Import the trainer when it is asked for: the leaves need no Lightning, nor wait for it."""
    if name in __all__:
        return getattr(import_module(f"pl_fed.{name.lower()}"), name)
    raise AttributeError(f"module 'pl_fed' has no attribute {name!r}")
