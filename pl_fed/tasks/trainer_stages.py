"""The stage of a trainer, as the steps of a LightningModule read it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

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


def _find_trainer(module: nn.Module) -> Any:
    """Return the trainer of a module; ``None`` if it has none with a stage."""
    trainer = getattr(module, "_trainer", None)
    return trainer if hasattr(trainer, "state") else None
