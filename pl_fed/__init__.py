"""A PyTorch Lightning trainer for federated learning: personalized, fair and robust at once."""

from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pl_fed.lazy_imports import quick_imports
from pl_fed.version import __version__ as __version__

if TYPE_CHECKING:
    from pl_fed.attacks.adversary import Adversary as Adversary
    from pl_fed.command.trained_run import load as load
    from pl_fed.engine.options import EngineOptions as EngineOptions
    from pl_fed.evaluation.smoothing import Smoothing as Smoothing
    from pl_fed.federation import Federation as Federation
    from pl_fed.lightning.trainer import Trainer as Trainer
    from pl_fed.privacy.differential_privacy import DifferentialPrivacy as DifferentialPrivacy
    from pl_fed.reports.benefit import measure_benefit as measure_benefit
    from pl_fed.reports.record import read_run as read_run
    from pl_fed.rounds.storage import StorageOptions as StorageOptions
    from pl_fed.studies.study import Study as Study
    from pl_fed.systems.settings import Systems as Systems

_OBJECTS = {
    "Adversary": "attacks.adversary",
    "DifferentialPrivacy": "privacy.differential_privacy",
    "EngineOptions": "engine.options",
    "Federation": "federation",
    "Smoothing": "evaluation.smoothing",
    "StorageOptions": "rounds.storage",
    "Study": "studies.study",
    "Systems": "systems.settings",
    "Trainer": "lightning.trainer",
    "load": "command.trained_run",
    "measure_benefit": "reports.benefit",
    "read_run": "reports.record",
}
_ROOMS = (
    *("aggregators", "attacks", "callbacks", "clients", "compressors", "data", "loggers"),
    *("metrics", "models"),
    *("optimizers", "partitioners", "privacy", "samplers", "skews", "statistics"),
    "systems",
)
_OF_LIGHTNING = (
    "EngineOptions",
    "Federation",
    "Trainer",
    "callbacks",
    "clients",
    "data",
    "load",
    "loggers",
)
__all__ = [*_OBJECTS, *_ROOMS]


def __getattr__(name: str) -> Any:
    """Import an object or room on its first use, so that the leaves do not import Lightning."""
    with quick_imports() if name in _OF_LIGHTNING else nullcontext():
        if name in _OBJECTS:
            return getattr(import_module(f"pl_fed.{_OBJECTS[name]}"), name)
        if name in _ROOMS:
            return import_module(f"pl_fed.{name}")
    raise AttributeError(f"module 'pl_fed' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names for completion in notebooks, without an import."""
    return sorted([*__all__, "__version__", "__doc__"])
