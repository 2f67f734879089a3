"""The loggers of a trainer that write to Weights & Biases."""

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger


def wandb_loggers(trainer: Trainer) -> list[WandbLogger]:
    """Return them: none, as a rule."""
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
