"""Logs what a round reports."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from pl_fed.loggers import RunCSV


class RoundMetrics(Callback):
    """Logs ``train/*``, ``time/round`` and ``round`` at every round, and ``round`` with metrics.

    How often rows are written is Lightning's ``log_every_n_steps``, in rounds.
    """

    def __init__(self) -> None:
        self._loaded: int | None = None

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Note after how many rounds a model that is only evaluated was saved."""
        self._loaded = int(checkpoint["global_step"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let ``metrics.csv`` go on where a checkpoint left off."""
        self._loaded = None
        for logger in trainer.loggers:
            if isinstance(logger, RunCSV) and trainer.is_global_zero:
                logger.keep(trainer.global_step)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log the round's report."""
        for name, value in outputs.items():
            if name == "loss":  # of Lightning's own, and the same as train/loss
                continue
            pl_module.log(
                name,
                value,
                on_step=True,
                on_epoch=False,
                prog_bar=name == "train/loss",
                batch_size=1,
            )
        self._log_round(trainer, pl_module, on_step=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log which round was validated."""
        self._log_round(trainer, pl_module, on_step=False)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log after which round was tested."""
        self._log_round(trainer, pl_module, on_step=False)

    def _log_round(self, trainer: Trainer, pl_module: LightningModule, on_step: bool) -> None:
        round = trainer.current_epoch if self._loaded is None else self._loaded
        pl_module.log(
            "round",
            float(round),
            on_step=on_step,
            on_epoch=not on_step,
            batch_size=1,
        )
