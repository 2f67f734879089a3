"""The Weights & Biases loggers of a trainer: each trainer has a W&B run of its own."""

import sys
import weakref
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger

_OWN: "weakref.WeakSet[WandbLogger]" = weakref.WeakSet()
"""The loggers with a W&B run that a trainer of pl_fed has begun."""


def wandb_loggers(trainer: Trainer) -> list[WandbLogger]:
    """Return the loggers of a trainer that write to Weights & Biases; usually none."""
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]


def begin_own_wandb_runs(trainer: Trainer, folder: Path) -> None:
    """Let the W&B loggers of a trainer begin runs of their own, in the run's folder.

    A new logger of Lightning's would go on with the run in progress: several fits in one process
    would write over each other. The run of an earlier trainer ends here; if that trainer logs
    again, it goes on with its run. A run that the user has begun by ``wandb.init`` stays.

    Args:
        trainer: The trainer, before it logs.
        folder: The folder of loggers without a ``save_dir``.
    """
    loggers = wandb_loggers(trainer)
    if not loggers:
        return
    active = getattr(sys.modules.get("wandb"), "run", None)
    owners = [logger for logger in _OWN if logger._experiment is active]
    if active is not None:
        if not owners or any(logger in loggers for logger in owners):
            return
        active.finish()
        for logger in owners:
            logger._wandb_init["id"] = logger._id = active.id
            logger._experiment = None
    for logger in loggers:
        _OWN.add(logger)
        if logger._experiment is None and logger._wandb_init.get("dir") in (None, "."):
            logger._wandb_init["dir"] = logger._save_dir = str(folder)
