"""A run's pictures in Weights & Biases, as in ``python -m pl_fed report``."""

import io
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from pl_fed.callbacks.round_metrics import find_evaluated_round
from pl_fed.loggers import wandb_loggers


class WandbReport(Callback):
    """Logs pictures after a test: results over clients and classes, curves and round times.

    With ``WANDB_MODE=disabled`` it draws none.

    Args:
        folder: The folder with the run's files; ``None`` logs nothing.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw and log the pictures."""
        if self.folder is None or not trainer.is_global_zero:
            return
        loggers = [logger for logger in wandb_loggers(trainer) if not logger.experiment.disabled]
        if not loggers:
            return
        import wandb
        from PIL import Image

        from pl_fed.reports import classes, clients, curves, times
        from pl_fed.reports.group import group_runs
        from pl_fed.reports.run import read_run

        draw_functions = (
            clients.draw_distributions,
            classes.draw_class_accuracy,
            curves.draw_validation,
            curves.draw_training_loss,
            curves.draw_uploads,
            times.draw_round_times,
        )
        try:
            groups = group_runs([read_run(self.folder)])
            pictures = [picture for draw in draw_functions for picture in draw(groups)]
        except Exception as error:  # a failed picture does not fail the run
            rank_zero_warn(f"The pictures of {self.folder} could not be drawn: {error!r}")
            return
        for logger in loggers:
            images = {
                f"report/{picture.name}": wandb.Image(
                    Image.open(io.BytesIO(picture.png())), caption=picture.title
                )
                for picture in pictures
            }
            logger.experiment.log({**images, "round": find_evaluated_round(trainer)})
