"""The metrics of a round, for progress bars, callbacks and loggers."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from pl_fed.loggers import RunCSV
from pl_fed.run_folder import last_checkpoint


class RoundMetrics(Callback):
    """Round metrics: publishes ``train/*``, ``time/round`` and ``round``; logs ``round``.

    The training loop passes the rows of rounds to loggers every ``log_every_n_steps`` rounds.
    """

    def __init__(self) -> None:
        self._loaded_round: int | None = None

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Store the round of the checkpoint, for an evaluation without training."""
        self._loaded_round = int(checkpoint["global_step"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove rows of ``metrics.csv`` after the round of the checkpoint, if rounds follow."""
        self._loaded_round = None
        if trainer.fit_loop.done:  # the results of a test stay
            return
        for logger in trainer.loggers:
            if isinstance(logger, RunCSV) and trainer.is_global_zero:
                continues = bool(last_checkpoint(logger.path.parent))  # in the run's own folder
                logs_rounds = getattr(trainer, "log_every_n_steps", 0) > 0
                logger.keep(trainer.global_step, warns=continues and logs_rounds)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Publish the round's metrics to callbacks, and its loss to the progress bar.

        ``self.log`` would do the same, but takes 0.2 ms for each number.
        """
        metrics = _convert_metrics({name: outputs[name] for name in outputs if name != "loss"})
        trainer.callback_metrics.update(metrics)
        trainer.logged_metrics.update(metrics)
        if trainer.progress_bar_callback is not None and "loss" in outputs:
            loss = float(outputs["loss"])  # waits for a GPU
            trainer.progress_bar_metrics["train/loss"] = loss

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the round of the validation."""
        self._log_round(trainer, pl_module)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the round of the test."""
        self._log_round(trainer, pl_module)

    def _log_round(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # a tensor on the CPU: Lightning would wait for a GPU to copy a number there and back
        round = torch.tensor(float(find_evaluated_round(trainer)))
        pl_module.log("round", round, batch_size=1)


def find_evaluated_round(trainer: Trainer) -> int:
    """Return the number of rounds behind the evaluated models, for example of a checkpoint."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    round_metrics = next(callback for callback in callbacks if isinstance(callback, RoundMetrics))
    loaded = round_metrics._loaded_round
    return trainer.current_epoch if loaded is None else loaded


def _convert_metrics(numbers: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    """Return numbers as float32 or float64 tensors, as Lightning's callbacks expect."""
    dtype = torch.get_default_dtype()
    floats = {name: value for name, value in numbers.items() if not isinstance(value, Tensor)}
    scalars = torch.tensor([*floats.values()], dtype=dtype).unbind()  # faster than one by one
    tensors = {
        name: value if value.dtype in (torch.float32, torch.float64) else value.to(dtype)
        for name, value in numbers.items()
        if isinstance(value, Tensor)
    }
    return {**tensors, **dict(zip(floats, scalars))}
