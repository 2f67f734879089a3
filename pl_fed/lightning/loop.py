"""The loop: one round is one epoch. The only file that names the trainer's internals (2.6).

Private names that it needs, and that ``tests/test_lightning.py`` holds: ``_FitLoop``;
``_call_lightning_module_hook``; the trainer's ``_logger_connector`` and ``_signal_connector``;
``_SignalConnector`` and its ``_sigterm_notifier_fn``; the
module's ``_current_fx_name``; of the epoch loop ``_should_check_val_epoch`` and
``_batches_that_stepped``. Besides, it moves the progress counters of the loops, which have no
underscore but no documentation either.
"""

import time
import warnings
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from pl_fed.federation import Federation
from pl_fed.lightning.compatibility import check_monitors, check_optimizer
from pl_fed.loggers import RunCSV, WaitingRows
from pl_fed.rounds.checks import explain_log
from pl_fed.rounds.round import RoundHooks

_Hooked = TypeVar("_Hooked")

_BAR_SECONDS = 0.1  # at least, between two moves of the progress bar within a round


class SignalConnector(_SignalConnector):
    """Lightning's signal handlers, of which that of SIGTERM talks to no other process.

    Lightning's own broadcasts from within the handler, which may run between any two calls that
    processes make together, or while others wait in one: they would wait for each other for ever.
    Here a SIGTERM is passed on to the processes that were launched, and noted. In a fit all agree
    on it after the round; an evaluation ends after the batch of clients.
    """

    def _sigterm_notifier_fn(self, signum: Any, _: Any) -> None:
        launcher = self.trainer.strategy.launcher
        if not self.received_sigterm and launcher is not None:
            launcher.kill(signum)
        self.received_sigterm = True


class FederatedLoop(_FitLoop):
    """Lightning's fit loop, whose epoch is a communication round.

    Hooks come as in any Lightning fit. A round is one batch, the ids of the cohort: it starts with
    ``batch_idx`` 0, its first client, and ends with that of its last one, of
    ``trainer.num_training_batches`` clients. The server's step is the optimizer's step, so
    ``trainer.global_step`` counts rounds.

    What a checkpoint holds goes on where it left off: what was done of a round (its training, its
    validation) is not done again, and the rest is.

    Args:
        trainer: The trainer whose loop this replaces; its epoch loop is carried over.
        federation: The federation that runs the rounds.

    Attributes:
        within_round: Whether clients are ahead of the server, or the server of ``metrics.csv``, so
            that no checkpoint can be saved.
        ends_together: Whether all processes are about to end the run, after the same round.
    """

    def __init__(self, trainer: Trainer, federation: Federation) -> None:
        replaced = trainer.fit_loop
        super().__init__(trainer, replaced.min_epochs, replaced.max_epochs)
        self.epoch_loop = replaced.epoch_loop
        trainer._signal_connector = SignalConnector(trainer)
        self.federation = federation
        self.within_round = False
        self.ends_together = False
        self._cohort = torch.empty(0, dtype=torch.int64)
        self._validated = self._was_validated = False
        self._watchable: list[str] | None = None
        self._metrics: dict[str, Tensor] = {}
        self._waiting: list[WaitingRows] = []
        self._bar_due = 0.0

    # Where a checkpoint left off

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Add the metrics, which callbacks and schedules may watch before they are logged anew.

        A validation is done once its numbers are logged.
        """
        metrics = {name: value.cpu() for name, value in self.trainer.callback_metrics.items()}
        logged = self._validated or (self.trainer.validating and self._hook == "on_validation_end")
        return {**super().on_save_checkpoint(), "metrics": metrics, "validated": logged}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Take them over; a run that was stopped early has ended, and is not taken up again."""
        super().on_load_checkpoint(state_dict)
        self._metrics = state_dict.get("metrics", {})
        self._was_validated = state_dict.get("validated", False)
        reasons = {each.stopping_reason for each in self.trainer.early_stopping_callbacks}
        self.trainer.should_stop = bool(reasons - {EarlyStoppingReason.NOT_STOPPED})
        if self.trainer.should_stop:
            rank_zero_info("The run was stopped early: without EarlyStopping it would go on.")

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Take over the counters."""
        super().load_state_dict(state_dict, prefix)
        self._settle()

    def reset(self) -> None:
        """Find out where to go on: between two rounds, or after a round's training."""
        torch.set_grad_enabled(True)
        self._settle()
        self._validated, self._was_validated = self._was_validated, False
        device = self.trainer.strategy.root_device
        saved = {name: value.to(device) for name, value in self._metrics.items()}
        self.trainer.callback_metrics.update(saved)
        self._metrics = {}
        self.within_round = self.ends_together = False

    def _settle(self) -> None:
        """Set counters as they are between two hooks: a checkpoint is saved within one."""
        rounds, finished = self.trainer.global_step, self.epoch_progress.current.processed
        batches = self.epoch_loop.batch_progress.total
        for counts in (self.epoch_progress.total, self.epoch_progress.current, batches):
            counts.ready = counts.started = rounds
            counts.processed = counts.completed = rounds if counts is batches else finished
        self.epoch_loop._batches_that_stepped = finished

    @property
    def _hook(self) -> str | None:
        """The hook that is being called."""
        name: str | None = self.trainer.lightning_module._current_fx_name
        return name

    @property
    def _unfinished(self) -> bool:
        """Whether the server has stepped in a round that was not brought to its end."""
        return bool(self.trainer.global_step > self.epoch_progress.current.processed)

    @property
    def done(self) -> bool:
        """Whether to stop; a round that was begun is finished first."""
        return not self._unfinished and bool(super().done)

    # A round

    def setup_data(self) -> None:
        """Draw the next cohort: the federation has the data, and there is no loader to set up."""
        self._cohort = self.federation.draw_cohort(self.epoch_progress.current.processed)
        self.max_batches = len(self._cohort)  # progress bars count the clients of the round

    def run(self) -> None:
        """Run the rounds, and write the rows of all, whatever happens."""
        try:
            super().run()
        finally:
            self.write_rows()

    def on_run_end(self) -> None:
        """End: whoever looks into ``metrics.csv`` then finds all rounds."""
        self.write_rows()
        super().on_run_end()

    def on_run_start(self) -> None:
        """Prepare schedules, loggers and validation, check what callbacks monitor, and begin."""
        _count_schedules_in_rounds(self.trainer)
        self._waiting = [
            logger.waiting
            if isinstance(logger, RunCSV)
            else WaitingRows(logger.log_metrics, logger.save)
            for logger in self.trainer.loggers
        ]
        # local steps are the clients' own: without its wrapper, DDP has no hooks on gradients
        self.trainer.strategy.model = self.trainer.lightning_module
        if self.trainer.enable_validation:  # what is wrong with it is said now, not rounds later
            self.trainer.validating = True
            self.epoch_loop.val_loop.setup_data()
            self.trainer.training = True
        names = self.federation.validated_names() if self.trainer.enable_validation else []
        check_optimizer(self.trainer, self.trainer.lightning_module)
        check_monitors(self.trainer, self.trainer.lightning_module, names)
        self._watchable = names
        self.trainer.lightning_module.train()
        with warnings.catch_warnings():  # it is the frozen parts that are
            warnings.filterwarnings("ignore", message="Found .* in eval mode at the start")
            super().on_run_start()

    def on_advance_start(self) -> None:
        """Begin a round, unless it was begun before the checkpoint."""
        self.setup_data()
        if not self._unfinished:
            self.epoch_progress.increment_ready()
            self._call("on_train_epoch_start")
            self.epoch_progress.increment_started()

    def advance(self) -> None:
        """Run the round, and validate if it is time."""
        epoch = self.epoch_loop
        if not self._unfinished:
            self._validated = False
            self._train()
        if epoch._should_check_val_epoch() and not self._validated:
            self.write_rows()
            epoch.val_loop.restarting = False
            self.trainer.validating = True
            try:
                epoch.val_loop.run()
            except BaseException:  # callbacks that watch it may have counted it, or not yet
                self.within_round = self._hook == "on_validation_end"
                raise
            self.trainer.training = True
            self._validated = True

    def on_advance_end(self) -> None:
        """End the round.

        Departs from Lightning: what was logged is written, and schedules that watch a metric step,
        before checkpoints are saved and not after; a resumed run would else miss both.
        """
        trainer, epoch, connector = self.trainer, self.epoch_loop, self.trainer._logger_connector
        connector.epoch_end_reached()
        self.epoch_progress.increment_processed()
        try:
            self._call("on_train_epoch_end", monitoring=False)
            connector.on_epoch_end()
            epoch.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            if connector.metrics["log"]:  # it is written at once, and the round's row before it
                self.write_rows()
            connector.update_train_epoch_metrics()
        except BaseException:  # a run that is resumed ends the round anew
            for counts in (self.epoch_progress.total, self.epoch_progress.current):
                counts.processed -= 1
            self._was_validated = self._validated
            raise
        epoch._batches_that_stepped = self.epoch_progress.current.processed
        self._call_callbacks("on_train_epoch_end", monitoring=True)
        self.epoch_progress.increment_completed()
        if trainer.strategy.reduce_boolean_decision(trainer.received_sigterm, all=False):
            self.ends_together = True
            raise SIGTERMException

    def _train(self) -> None:
        trainer, epoch, cohort = self.trainer, self.epoch_loop, self._cohort
        epoch.val_loop.batch_progress.reset()
        epoch.batch_progress.reset_on_run()
        epoch.batch_progress.is_last_batch = True
        epoch.batch_progress.increment_ready()
        trainer._logger_connector.on_batch_start(cohort)
        self._call("on_train_batch_start", cohort, 0)
        epoch.batch_progress.increment_started()
        self.within_round = True
        row = {**self._run_round(), "round": float(self.epoch_progress.current.processed)}
        if self._watchable is not None and "train/loss" in row:  # now all names are known
            names, self._watchable = [*self._watchable, *row], None
            check_monitors(self.trainer, self.trainer.lightning_module, names, whole=True)
        epoch.batch_progress.increment_processed()
        epoch.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        loss = {"loss": row["train/loss"]} if "train/loss" in row else {}
        outputs, last = {**row, **loss}, len(cohort) - 1
        self._call("on_train_batch_end", outputs, cohort, last, monitoring=False)
        trainer._logger_connector.on_batch_end()
        self._log(row)
        self.within_round = False  # the round's row is written before a checkpoint that holds it
        self._call_callbacks("on_train_batch_end", outputs, cohort, last, monitoring=True)
        epoch.batch_progress.increment_completed()

    def _run_round(self) -> dict[str, Tensor | float]:
        """Let the federation run the round, and return what it reports."""
        # PyTorchProfiler counts steps by actions of such an ending
        with self.trainer.profiler.profile("run_federated_round.training_step"), explain_log():
            report: dict[str, Tensor | float] = self.federation.run_round(
                self.epoch_progress.current.processed,
                self.trainer.optimizers[0],
                RoundHooks(
                    on_server_step=lambda optimizer: self._call(
                        "on_before_optimizer_step", optimizer
                    ),
                    on_clients_done=self._show_progress,
                ),
            )
        for optimizer in self.trainer.optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # it stepped in the engine
        steps = self.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        steps.increment_ready()
        steps.increment_completed()
        return report

    def _log(self, row: dict[str, Tensor | float]) -> None:
        """Let the round's row wait, with what ``self.log`` was given; write all if it is time."""
        trainer, connector = self.trainer, self.trainer._logger_connector
        if trainer.log_every_n_steps:
            row = {"epoch": row["round"], **row, **connector.metrics["log"]}
            for rows in self._waiting:
                rows.add(row, self.epoch_loop._batches_that_stepped)
        if connector.should_update_logs:
            self.write_rows()

    def write_rows(self) -> None:
        """Write the rows of all rounds that are not written yet, to every logger."""
        for rows in self._waiting:
            rows.write()

    def _call(self, hook: str, *args: Any, monitoring: bool | None = None) -> None:
        """Call a hook of the callbacks and of the module: see :meth:`_call_callbacks`."""
        self._call_callbacks(hook, *args, monitoring=monitoring)
        if not _overriding([self.trainer.lightning_module], LightningModule, hook):
            return
        if _call_lightning_module_hook(self.trainer, hook, *args) == -1:
            raise ValueError(
                f"Expected `{hook}` not to return -1: a round is one batch, and is not left out."
            )

    def _call_callbacks(self, hook: str, *args: Any, monitoring: bool | None = None) -> None:
        """Call a hook of the callbacks.

        Departs from Lightning: only callbacks that override the hook are called. Most override few
        hooks, and calling the empty ones would take 0.1 ms of each round.

        Args:
            hook: The name of the hook.
            *args: Its arguments, after the trainer and the module.
            monitoring: Whether only the callbacks are called that watch a metric to save or to
                stop, or only the others; ``None`` calls all of them.
        """
        trainer, module = self.trainer, self.trainer.lightning_module
        callbacks = _overriding(trainer.callbacks, Callback, hook)
        if monitoring is not None:
            callbacks = [
                callback
                for callback in callbacks
                if isinstance(callback, (Checkpoint, EarlyStopping)) is monitoring
            ]
        if not callbacks:
            return
        outer_hook, module._current_fx_name = self._hook, hook
        for callback in callbacks:
            with trainer.profiler.profile(f"[Callback]{callback.state_key}.{hook}"):
                getattr(callback, hook)(trainer, module, *args)
        module._current_fx_name = outer_hook

    def _show_progress(self, done: int) -> None:
        """Move the progress bar on within the round, if one can see that it moves."""
        now = time.monotonic()
        if now < self._bar_due or done == self.max_batches:  # the end of the round moves it on
            return
        self._bar_due = now + _BAR_SECONDS
        bar, module = self.trainer.progress_bar_callback, self.trainer.lightning_module
        if bar is not None and getattr(bar, "is_enabled", True):
            bar.on_train_batch_end(self.trainer, module, {}, self._cohort, done - 1)


def _overriding(objects: Iterable[_Hooked], parent: type, hook: str) -> list[_Hooked]:
    """Return the objects that have, or whose class has, a hook other than their parent class's."""
    inherited = getattr(parent, hook)
    return [
        instance
        for instance in objects
        if getattr(type(instance), hook, None) is not inherited or hook in vars(instance)
    ]


def _count_schedules_in_rounds(trainer: Trainer) -> None:
    """Let learning-rate schedules step once a round: a round is an epoch and a step."""
    for config in trainer.lr_scheduler_configs:
        config.interval = "epoch"
        if config.reduce_on_plateau and str(config.monitor).startswith("val/"):
            config.frequency = trainer.check_val_every_n_epoch or 1
