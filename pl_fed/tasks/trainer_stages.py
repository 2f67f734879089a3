"""The stage and the counters of a trainer, as the steps of a LightningModule read them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn

COUNTERS = ("global_step", "num_training_batches")
"""Numbers of a trainer that count local steps in a plain fit, and rounds or clients here."""

_FLAGS = {"train": "training", "validation": "validating", "test": "testing"}


def is_sanity_check(module: nn.Module) -> bool:
    """Return whether the trainer of a module, if there is one, is in its sanity check."""
    return bool(getattr(_find_trainer(module), "sanity_checking", False))


@contextmanager
def trainer_stage(module: nn.Module, stage: str) -> Iterator[None]:
    """Let the trainer of a module, if there is one, tell the stage of a step within the context.

    A trial before training runs validation and test steps, and a test may validate. A step may
    name its logs by ``self.trainer.state.stage`` or ``self.trainer.validating``. A sanity check
    stays one.

    Args:
        module: A LightningModule.
        stage: ``train``, ``validation`` or ``test``.
    """
    trainer = _find_trainer(module)
    if trainer is None or is_sanity_check(module):
        yield
        return
    state = trainer.state
    before = state.stage
    setattr(trainer, _FLAGS[stage], True)
    try:
        yield
    finally:
        state.stage = before


@contextmanager
def note_counters(module: nn.Module) -> Iterator[set[str]]:
    """Yield a set of ``COUNTERS``; it grows whenever a step reads one from the module's trainer.

    Args:
        module: A LightningModule.
    """
    reads: set[str] = set()

    def lend(name: str, counter: property) -> property:
        """Return a property with the same number that notes a read."""

        def read(trainer: Any) -> Any:
            """Return the number."""
            reads.add(name)
            return counter.__get__(trainer)

        return property(read)

    kind = type(_find_trainer(module))
    with ExitStack() as patches:
        for name in COUNTERS:
            counter = getattr(kind, name, None)
            if isinstance(counter, property):
                patches.enter_context(mock.patch.object(kind, name, lend(name, counter)))
        yield reads


def _find_trainer(module: nn.Module) -> Any:
    """Return the trainer of a module; ``None`` if it has none with a stage."""
    trainer = getattr(module, "_trainer", None)
    return trainer if hasattr(trainer, "state") else None
