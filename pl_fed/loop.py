"""The loop: one round is one epoch. The only file that names Lightning's internals (2.6)."""

from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden

from pl_fed.clients.base import Client
from pl_fed.engine import Clipping
from pl_fed.federation import Federation

PRECISIONS = ("32-true", "64-true", "bf16-mixed")
_NEVER_CALLED = ("on_before_backward", "on_after_backward")
_REFUSED_CALLBACKS: tuple[type[Callback], ...] = (
    BackboneFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)


class FederatedLoop(_FitLoop):
    """Lightning's fit loop, whose epoch is a communication round.

    Hooks come as in any Lightning fit: a round is one batch, the batch being the ids of the cohort,
    and the server's step is the optimizer's step; ``trainer.global_step`` counts rounds.

    Args:
        trainer: The trainer whose loop this replaces; its epoch loop is carried over.
        federation: The federation that runs the rounds.
    """

    def __init__(self, trainer: Trainer, federation: Federation) -> None:
        replaced = trainer.fit_loop
        super().__init__(trainer, replaced.min_epochs, replaced.max_epochs)
        self.epoch_loop = replaced.epoch_loop
        self.federation = federation
        self._validated = False

    def on_run_start(self) -> None:
        """Refuse what a round cannot honour, and hand over what it can."""
        check_trainer(self.trainer)
        prepare(self.trainer, self.federation)
        super().on_run_start()

    def reset(self) -> None:
        """Find out where a checkpoint left off: between two rounds, or within one."""
        torch.set_grad_enabled(True)
        progress, evaluation = self.epoch_progress.current, self.epoch_loop.val_loop.batch_progress
        if progress.processed == progress.ready:
            _Loop.restarting.fset(self, False)  # type: ignore[attr-defined]
        self.update_restart_stage()
        if self.restarted_on_epoch_start:
            self.epoch_progress.reset_on_restart()
        if self.resumed_on_epoch_end:
            self.epoch_progress.increment_completed()
        counts = evaluation.current
        self._validated = evaluation.is_last_batch and counts.completed == counts.ready > 0

    def advance(self) -> None:
        """Run one round, and validate if it is time.

        A checkpoint may have been saved in the middle of an epoch: what was done is not done again.
        """
        epoch = self.epoch_loop
        rounds = epoch.automatic_optimization.optim_progress.optimizer.step.total.completed
        if rounds == self.epoch_progress.current.processed:
            self._round()
            self._validated = False
        if epoch._should_check_val_epoch() and not self._validated:
            epoch.val_loop.restarting = False
            self.trainer.validating = True
            epoch.val_loop.run()
            self.trainer.training = True
        epoch._batches_that_stepped += 1

    def _round(self) -> None:
        trainer, epoch = self.trainer, self.epoch_loop
        round = self.epoch_progress.current.processed
        cohort = self.federation.draw_cohort(round)
        self.max_batches = len(cohort)  # progress bars count the clients of the round
        connector = trainer._logger_connector
        epoch.val_loop.batch_progress.reset_on_run()
        epoch.batch_progress.reset_on_run()
        epoch.batch_progress.is_last_batch = True
        epoch.batch_progress.increment_ready()
        connector.on_batch_start(cohort)
        call._call_callback_hooks(trainer, "on_train_batch_start", cohort, 0)
        call._call_lightning_module_hook(trainer, "on_train_batch_start", cohort, 0)
        epoch.batch_progress.increment_started()
        with trainer.profiler.profile("run_federated_round"):
            report = self.federation.run_round(
                round,
                trainer.optimizers[0],
                on_server_step=self._before_server_step,
                on_clients_done=self._show_progress,
            )
        for optimizer in trainer.optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # it stepped in the engine
        steps = epoch.automatic_optimization.optim_progress.optimizer.step
        steps.increment_ready()
        steps.increment_completed()
        epoch.batch_progress.increment_processed()
        epoch.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        # the round's row is written before a checkpoint that holds the round
        call._call_callback_hooks(
            trainer,
            "on_train_batch_end",
            report,
            cohort,
            len(cohort) - 1,
            monitoring_callbacks=False,
        )
        call._call_lightning_module_hook(
            trainer, "on_train_batch_end", report, cohort, len(cohort) - 1
        )
        connector.on_batch_end()
        connector.update_train_step_metrics()
        call._call_callback_hooks(
            trainer,
            "on_train_batch_end",
            report,
            cohort,
            len(cohort) - 1,
            monitoring_callbacks=True,
        )
        epoch.batch_progress.increment_completed()

    def _before_server_step(self, optimizer: torch.optim.Optimizer) -> None:
        call._call_callback_hooks(self.trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(self.trainer, "on_before_optimizer_step", optimizer)

    def _show_progress(self, done: int) -> None:
        """Move the progress bar on within the round."""
        bar = self.trainer.progress_bar_callback
        if bar is not None and bar.is_enabled and done < self.max_batches:
            module = self.trainer.lightning_module
            bar.on_train_batch_end(self.trainer, module, {}, None, done - 1)


def prepare(trainer: Trainer, federation: Federation) -> None:
    """Hand the trainer's settings to the federation: precision, clipping, limits."""
    plugin = trainer.precision_plugin
    federation.engine.autocast = (
        plugin.forward_context if trainer.precision == "bf16-mixed" else nullcontext
    )
    federation.engine.clipping = Clipping(
        trainer.gradient_clip_val, str(trainer.gradient_clip_algorithm or "norm")
    )
    limit = trainer.limit_train_batches
    federation.limit_local_steps = None if limit == 1.0 and isinstance(limit, float) else limit
    federation.shuffle = not trainer.overfit_batches


def check_trainer(trainer: Trainer) -> None:
    """Refuse settings that a federated round cannot honour.

    Raises:
        ValueError: With one sentence that names the setting, what was expected and what came.
    """
    found: dict[str, Any] = {
        "accumulate_grad_batches": (trainer.accumulate_grad_batches, 1, "use a larger batch_size"),
        "val_check_interval": (
            trainer.val_check_interval,
            1.0,
            "a round is validated as a whole: use check_val_every_n_epoch",
        ),
        "reload_dataloaders_every_n_epochs": (
            trainer.reload_dataloaders_every_n_epochs,
            0,
            "the clients' data stays the same",
        ),
        "world_size": (trainer.world_size, 1, "several processes are not supported yet"),
    }
    for name, (value, expected, hint) in found.items():
        if value != expected:
            raise ValueError(
                f"Expected trainer argument `{name}` to be {expected} but got {value}: {hint}."
            )
    if trainer.precision not in PRECISIONS:
        raise ValueError(
            f"Expected trainer argument `precision` to be one of {', '.join(PRECISIONS)} but got"
            f" {trainer.precision}: local steps have no loss scaling, and small updates would be"
            " lost in a low-precision global model."
        )
    for callback in trainer.callbacks:
        if isinstance(callback, _REFUSED_CALLBACKS):
            raise ValueError(
                f"Expected trainer argument `callbacks` without {type(callback).__name__} but got"
                " one: it changes how single batches are trained, which a round does not offer."
            )
        for hook in _NEVER_CALLED:
            if is_overridden(hook, callback, Callback):
                raise ValueError(
                    f"Expected trainer argument `callbacks` without the hook `{hook}` but got it in"
                    f" {type(callback).__name__}: many clients may be trained at once, so a"
                    " local step has no hooks; use on_before_optimizer_step, which is called"
                    " before the server's step, or on_train_batch_end, after a round."
                )
    if not isinstance(trainer.lightning_module, Client):
        raise TypeError(
            "Expected argument `model` to be a pl_fed.clients.Client but got"
            f" {type(trainer.lightning_module).__name__}."
        )
