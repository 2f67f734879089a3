"""A run's own pictures in Weights & Biases: those that ``python -m pl_fed report`` would show."""

import io
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from pl_fed.callbacks.round_metrics import round_of
from pl_fed.loggers import wandb_loggers


class WandbReport(Callback):
    """Logs the distribution over clients, accuracy by class, curves and times after a test.

    Args:
        folder: The run's folder, whose files are drawn; ``None`` logs nothing.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw and log the pictures."""
        loggers = wandb_loggers(trainer)
        if not loggers or self.folder is None or not trainer.is_global_zero:
            return
        import wandb
        from PIL import Image

        from pl_fed.reports import classes, clients, curves, times
        from pl_fed.reports.group import grouped
        from pl_fed.reports.run import read_run

        by_round = (curves.validation, curves.training, curves.uploads, times.of_rounds)
        drawn = (clients.distributions, classes.by_class, *by_round)
        try:
            run = grouped([read_run(self.folder)])
            pictures = [picture for draw in drawn for picture in draw(run)]
        except Exception as error:  # the run is whole all the same
            rank_zero_warn(f"The pictures of {self.folder} could not be drawn: {error!r}")
            return
        for logger in loggers:
            images = {
                f"report/{each.name}": wandb.Image(
                    Image.open(io.BytesIO(each.png())), caption=each.title
                )
                for each in pictures
            }
            logger.experiment.log({**images, "round": round_of(trainer)})
