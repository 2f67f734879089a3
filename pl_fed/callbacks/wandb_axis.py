"""Rounds as the x-axis of Weights & Biases, and best values in its summary."""

from lightning.pytorch import Callback, LightningModule, Trainer

from pl_fed.clients.base import Client
from pl_fed.loggers import forget_postponed, wandb_loggers

_BEST = {
    "accuracy": "max",
    "accuracy_weighted": "max",
    "accuracy_worst10": "max",
    "accuracy_std": "min",
    "loss": "min",
}


class WandbAxis(Callback):
    """W&B axis: ``round`` for all metrics, and each validation metric's best value in a summary."""

    def __init__(self) -> None:
        self._defined = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Define the metrics, after the trainer has accepted any checkpoint."""
        self._define(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Define the metrics of a validation without a fit."""
        if not trainer.sanity_checking:
            self._define(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Define the metrics of a test without a fit."""
        self._define(trainer, pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Let loggers end without an experiment if the checkpoint was refused."""
        forget_postponed(trainer.loggers)

    def _define(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Define the metrics once."""
        if self._defined or not isinstance(pl_module, Client):  # a test follows a fit
            return
        self._defined = True
        for logger in wandb_loggers(trainer):
            run = logger.experiment
            run.define_metric("round")
            run.define_metric("*", step_metric="round")
            best_of = dict(_BEST)
            for name, is_higher in pl_module.task.metric_directions().items():
                if is_higher is None:
                    best_of |= {f"{name}_std": "min"}
                    continue
                best = "max" if is_higher else "min"
                best_of |= {name: best, f"{name}_worst10": best, f"{name}_std": "min"}
            for model in (*pl_module.evaluated, "hybrid"):
                for name, best in best_of.items():
                    run.define_metric(
                        f"val/{model}/{name}", step_metric="round", summary=f"{best},last"
                    )
