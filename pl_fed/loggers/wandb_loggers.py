"""The Weights & Biases loggers of a trainer."""

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger


def wandb_loggers(trainer: Trainer) -> list[WandbLogger]:
    """Return the loggers of a trainer that write to Weights & Biases; usually none."""
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
