"""The stage and the numbers of a trainer, as the steps of a LightningModule read them."""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn

METRICS = "callback_metrics"
"""The property of a trainer with all logged metrics: here, those over clients."""
LOADER = "train_dataloader"
"""The property of a trainer, and the method of its data, with clients here."""
READS = ("global_step", "num_training_batches", "is_last_batch", LOADER, METRICS)
"""Properties of a trainer that are about local steps in a plain fit, and about rounds here."""

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
def note_reads(module: nn.Module, names: Collection[str] = READS) -> Iterator[set[str]]:
    """Yield a set of ``READS``; it grows whenever a step reads one from the module's trainer.

    Args:
        module: A LightningModule.
        names: The properties to note.
    """
    reads: set[str] = set()

    def lend(name: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that notes a read and calls another."""

        def read(owner: Any) -> Any:
            """Return the value."""
            reads.add(name)
            return function(owner)

        return read

    trainer = _find_trainer(module)
    kind, data_kind = type(trainer), type(getattr(trainer, "datamodule", None))
    with ExitStack() as patches:
        for name in names:
            value = getattr(kind, name, None)
            if isinstance(value, property):
                noting = property(lend(name, value.__get__))
                patches.enter_context(mock.patch.object(kind, name, noting))
        if LOADER in names and hasattr(data_kind, LOADER):
            method = lend(LOADER, getattr(data_kind, LOADER))
            patches.enter_context(mock.patch.object(data_kind, LOADER, method))
        yield reads


def _find_trainer(module: nn.Module) -> Any:
    """Return the trainer of a module; ``None`` if it has none with a stage."""
    trainer = getattr(module, "_trainer", None)
    return trainer if hasattr(trainer, "state") else None
