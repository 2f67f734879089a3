"""The loop: one round is one epoch. The only file that names the trainer's internals (2.6).

It needs these private names, which ``tests/test_lightning.py`` checks: ``_FitLoop``;
``_call_lightning_module_hook``; the trainer's ``_logger_connector``, ``_signal_connector`` and
``_checkpoint_connector``; ``_SignalConnector`` and its ``_sigterm_notifier_fn``;
``_CheckpointConnector`` and its ``_hpc_resume_path``; ``_ResultCollection`` and the ``_results`` of
the loops; the ``_evaluation_step`` and ``_predict_step`` of the loops; the module's
``_current_fx_name``; of the epoch loop ``_should_check_val_epoch`` and ``_batches_that_stepped``;
of ``ModelCheckpoint`` ``_last_global_step_saved`` and ``_last_checkpoint_saved``. It also changes
the progress counters of the loops, which are public but undocumented.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from pl_fed.federation import Federation
from pl_fed.lightning.compatibility import (
    check_monitors,
    check_optimizer,
    check_private_monitors,
    list_options,
    warn_of_kept_options,
    warn_of_opposite_modes,
    warn_of_published_seed,
    warn_of_trained_net,
)
from pl_fed.loggers import RunCSV, WaitingRows
from pl_fed.preflight.explanations import explain_step
from pl_fed.rounds.round import RoundHooks
from pl_fed.text import find_code_line

_Hooked = TypeVar("_Hooked")
_Result = TypeVar("_Result")

_BAR_SECONDS = 0.1  # shortest time between two updates of the progress bar within a round


class SignalConnector(_SignalConnector):
    """Signal connector: Lightning's signal handlers, with a SIGTERM handler that only takes a note.

    Lightning's own handler broadcasts. It may run between any two collective calls, or while other
    processes wait in one, and then the processes wait for each other forever. This handler notes
    the SIGTERM, and passes it on to launched processes. In a fit, all processes agree on it after
    the round; an evaluation ends after the batch of clients.
    """

    def _sigterm_notifier_fn(self, signum: Any, _: Any) -> None:
        launcher = self.trainer.strategy.launcher
        if not self.received_sigterm and launcher is not None:
            launcher.kill(signum)
        self.received_sigterm = True


class CheckpointConnector(_CheckpointConnector):
    """Checkpoint connector: Lightning's, for evaluations that have the models at hand.

    In a job of SLURM, Lightning's own loads the checkpoint of a requeue signal in each call without
    ``ckpt_path``, also in the test after a fit: that would be a test of an earlier round.
    """

    @property
    def _hpc_resume_path(self) -> str | None:
        return super()._hpc_resume_path if self.trainer.state.fn == TrainerFn.FITTING else None


class EvaluationResults(_ResultCollection):
    """Evaluation results: the numbers of an evaluation, beside those that ``self.log`` logs.

    ``self.log`` makes a ``torchmetrics.Metric`` of each number: for fifty numbers, that took 40 %
    of the time of a short run. The numbers of a federation are computed already.
    """

    def __init__(self) -> None:
        super().__init__(training=False)
        self._numbers: dict[str, Tensor] = {}
        self._bar_names: set[str] = set()

    def add(self, numbers: Mapping[str, Tensor], bar_names: Iterable[str]) -> None:
        """Add numbers by name; the progress bar has those of ``bar_names``, no logger NaN."""
        self._numbers.update(numbers)
        self._bar_names.update(bar_names)

    def metrics(self, on_step: bool) -> Any:
        """Return the numbers for callbacks, loggers and the progress bar."""
        metrics = super().metrics(on_step)
        for name, value in {} if on_step else self._numbers.items():
            metrics["callback"][name] = value
            if not value.isnan():
                metrics["log"][name] = value
            if name in self._bar_names:
                metrics["pbar"][name] = value.item()
        return metrics

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Reset the results, before an evaluation."""
        super().reset(metrics, fx)
        self._numbers, self._bar_names = {}, set()


def _refuse_stop_iteration(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Return a function that raises a ``RuntimeError`` in place of ``StopIteration``.

    Lightning takes the latter for the end of the data. An exhausted iterator in a client's step, a
    data set or a callback would end the run, or leave other clients out of an evaluation, without
    a word.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> _Result:
        try:
            return function(*args, **kwargs)
        except StopIteration as stop:
            line = find_code_line(stop)
            error = RuntimeError(
                "Expected steps, data sets and callbacks not to raise StopIteration, which would"
                f" end the loop around them, but got it{f' ({line})' if line else ''}: begin the"
                " iterator anew when it is exhausted, or give `next` a default."
            )
            for note in getattr(stop, "__notes__", ()):
                error.add_note(note)
            raise error from stop

    return call


class FederatedLoop(_FitLoop):
    """Federated loop: Lightning's fit loop with a communication round as its epoch.

    Lightning's hooks are called as in any fit. A round is one batch, the ids of the cohort. It
    starts with ``batch_idx`` 0, the first client, and ends with the ``batch_idx`` of the last
    client; ``trainer.num_training_batches`` is the number of its clients. The server's step is the
    optimizer's step, so ``trainer.global_step`` counts rounds.

    A resumed run continues within a round: training and validation that the checkpoint contains
    are not repeated. A run that resumes after its last round starts and ends as any other, with the
    hooks ``on_train_start`` and ``on_train_end``: Lightning would call neither, and a callback such
    as ``WeightAveraging`` changes the model in the latter.

    Args:
        trainer: The trainer; this loop replaces its fit loop and keeps its epoch loop.
        federation: The federation that runs the rounds.

    Attributes:
        within_round: Whether clients are ahead of the server, or the server is ahead of
            ``metrics.csv``. Then no checkpoint can be saved.
        ends_together: Whether all processes are about to end the run, after the same round.
    """

    def __init__(self, trainer: Trainer, federation: Federation) -> None:
        replaced = trainer.fit_loop
        super().__init__(trainer, replaced.min_epochs, replaced.max_epochs)
        self.epoch_loop = replaced.epoch_loop
        trainer._signal_connector = SignalConnector(trainer)
        trainer._checkpoint_connector = CheckpointConnector(trainer)
        for loop in (self.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            loop._results = EvaluationResults()
            step = _refuse_stop_iteration(loop._evaluation_step)
            loop._evaluation_step = step  # type: ignore[method-assign]
        step = _refuse_stop_iteration(trainer.predict_loop._predict_step)
        trainer.predict_loop._predict_step = step  # type: ignore[method-assign]
        self.federation = federation
        self.within_round = False
        self.ends_together = False
        self._cohort = torch.empty(0, dtype=torch.int64)
        self._validated = self._was_validated = self._is_restored = False
        self._validated_names: list[str] | None = None  # until the monitors are checked
        self._metrics: dict[str, Tensor] = {}
        self._configured: list[dict[str, Any]] = []  # options of optimizers before the restore
        self._row_queues: list[WaitingRows] = []
        self._bar_due = 0.0

    # Checkpoints

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Add the metrics, because callbacks and schedules may need them before the next log.

        A validation is done after its metrics are logged.
        """
        metrics = {name: value.cpu() for name, value in self.trainer.callback_metrics.items()}
        is_logged = self.trainer.validating and self._hook == "on_validation_end"
        validated = self._validated or is_logged
        return {**super().on_save_checkpoint(), "metrics": metrics, "validated": validated}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Restore the metrics; a run that was stopped early has ended, and does not continue."""
        super().on_load_checkpoint(state_dict)
        self._metrics = state_dict.get("metrics", {})
        self._was_validated = state_dict.get("validated", False)
        callbacks = self.trainer.early_stopping_callbacks
        reasons = {callback.stopping_reason for callback in callbacks}
        self.trainer.should_stop = bool(reasons - {EarlyStoppingReason.NOT_STOPPED})
        if self.trainer.should_stop:
            rank_zero_info("The run was stopped early: to continue it, remove EarlyStopping.")

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Restore the progress counters; Lightning restores the optimizers next."""
        super().load_state_dict(state_dict, prefix)
        self._configured = list_options(self.trainer)
        self._is_restored = True
        self._set_counters()

    def reset(self) -> None:
        """Prepare to continue between two rounds, or after the training of a round."""
        torch.set_grad_enabled(True)
        self._set_counters()
        self._validated, self._was_validated = self._was_validated, False
        device = self.trainer.strategy.root_device
        saved = {name: value.to(device) for name, value in self._metrics.items()}
        self.trainer.callback_metrics.update(saved)
        self._metrics = {}
        self.within_round = self.ends_together = False

    def _set_counters(self) -> None:
        """Set the progress counters to their values between hooks: checkpoints are saved in one."""
        rounds, finished = self.trainer.global_step, self.epoch_progress.current.processed
        batches = self.epoch_loop.batch_progress.total
        for counts in (self.epoch_progress.total, self.epoch_progress.current, batches):
            counts.ready = counts.started = rounds
            counts.processed = counts.completed = rounds if counts is batches else finished
        self.epoch_loop._batches_that_stepped = finished

    def log_evaluation(self, numbers: Mapping[str, Tensor], bar_names: Iterable[str]) -> None:
        """Log the numbers of the running evaluation; see :class:`EvaluationResults`."""
        results: Any = self.trainer._results
        results.add(numbers, bar_names)

    @property
    def _hook(self) -> str | None:
        """The name of the running hook, or ``None``."""
        name: str | None = self.trainer.lightning_module._current_fx_name
        return name

    @property
    def _unfinished(self) -> bool:
        """Whether the server has stepped in a round that has not ended."""
        return bool(self.trainer.global_step > self.epoch_progress.current.processed)

    @property
    def done(self) -> bool:
        """Whether to stop; a started round is finished first."""
        return not self._unfinished and (bool(super().done) or self.federation.budget_is_spent())

    @property
    def skip(self) -> bool:
        """Whether to train nothing and call no hook: a new run without rounds."""
        return self.trainer.limit_train_batches == 0 or (self.done and not self._is_restored)

    # A round

    def setup_data(self) -> None:
        """Draw the next cohort; there is no loader, because the federation has the data."""
        rounds = self.federation.session.rounds
        self._cohort = rounds.draw_cohort(self.epoch_progress.current.processed)
        self.max_batches = max(1, len(self._cohort))  # progress bars count the clients of the round

    def run(self) -> None:
        """Run the rounds; also after an error, write the rows of all rounds."""
        try:
            super().run()
        finally:
            self._is_restored = False
            self.write_rows()

    def on_run_end(self) -> None:
        """End the run; write the rows of all rounds first, so that ``metrics.csv`` is complete."""
        self.write_rows()
        super().on_run_end()

    def on_run_start(self) -> None:
        """Prepare schedules, loggers and validation, check the monitors, and start the run."""
        _count_schedules_in_rounds(self.trainer)
        self._row_queues = [
            logger.waiting
            if isinstance(logger, RunCSV)
            else WaitingRows(logger.log_metrics, logger.save, drops_undefined=True)
            for logger in self.trainer.loggers
        ]
        # without its wrapper, DDP does not synchronise the gradients of local steps
        self.trainer.strategy.model = self.trainer.lightning_module
        if self.trainer.enable_validation:  # errors of validation appear now, not rounds later
            self.trainer.validating = True
            self.epoch_loop.val_loop.setup_data()
            self.trainer.training = True
        session = self.federation.session
        names = session.list_validated() if self.trainer.enable_validation else []
        check_optimizer(self.trainer, self.trainer.lightning_module)
        session.rounds.local_training.check_schedule()
        if self.federation.privacy is not None:
            check_private_monitors(self.trainer, session.list_public())
            warn_of_published_seed(self.trainer)
        check_monitors(self.trainer, self.trainer.lightning_module, names)
        begins_anew = not self._is_restored and self.federation.initial_model is None
        warn_of_trained_net(session.client, begins_anew)
        warn_of_opposite_modes(self.trainer, session.client.task.metric_directions())
        self._validated_names = names
        if self._is_restored:
            self._restore_saved_marks()
            warn_of_kept_options(self._configured, list_options(self.trainer))
        self.trainer.lightning_module.train()
        with warnings.catch_warnings():  # only frozen parts are in eval mode
            warnings.filterwarnings("ignore", message="Found .* in eval mode at the start")
            super().on_run_start()

    def _restore_saved_marks(self) -> None:
        """Restore the marks of saved files in checkpoint callbacks: Lightning's state lacks them.

        Otherwise they would save ``last.ckpt`` again as training ends, after other callbacks have
        changed the model.
        """
        for callback in self.trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                saved = callback.last_model_path or callback.best_model_path
                callback._last_checkpoint_saved = saved
                if self.done:  # the run resumes from the file of this round
                    callback._last_global_step_saved = self.trainer.global_step

    @_refuse_stop_iteration
    def on_advance_start(self) -> None:
        """Begin a round, unless the checkpoint contains its beginning."""
        self.setup_data()
        if not self._unfinished:
            self.epoch_progress.increment_ready()
            self._call("on_train_epoch_start")
            self.epoch_progress.increment_started()

    @_refuse_stop_iteration
    def advance(self) -> None:
        """Run the round, and validate if a validation is due."""
        epoch = self.epoch_loop
        if not self._unfinished:
            self._validated = False
            self._train()
        if epoch._should_check_val_epoch() and not self._validated:
            self.write_rows()
            epoch.val_loop.restarting = False
            self.trainer.validating = True
            counts = epoch.val_loop.batch_progress.state_dict()
            try:
                epoch.val_loop.run()
            except BaseException:  # some callbacks may have counted it, and others not
                self.within_round = self._hook == "on_validation_end"
                epoch.val_loop.batch_progress.load_state_dict(counts)  # a resumed run repeats it
                raise
            self.trainer.training = True
            self._validated = True

    @_refuse_stop_iteration
    def on_advance_end(self) -> None:
        """End the round.

        Departs from Lightning: before checkpoints are saved, logged values are written and
        schedules with a monitor step. Otherwise a resumed run would miss both.
        """
        trainer, epoch, connector = self.trainer, self.epoch_loop, self.trainer._logger_connector
        connector.epoch_end_reached()
        self.epoch_progress.increment_processed()
        try:
            self._call("on_train_epoch_end", monitoring=False)
            connector.on_epoch_end()
            epoch.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            if self._read_logged_values():  # Lightning writes them next, after the round's row
                self.write_rows()
            connector.update_train_epoch_metrics()
        except BaseException:  # a resumed run ends the round again
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
        """Run a round as Lightning's training on one batch, with its hooks and counters."""
        trainer, epoch, cohort = self.trainer, self.epoch_loop, self._cohort
        epoch.val_loop.batch_progress.reset()
        epoch.batch_progress.reset_on_run()
        epoch.batch_progress.is_last_batch = True
        epoch.batch_progress.increment_ready()
        trainer._logger_connector.on_batch_start(cohort)
        self._call("on_train_batch_start", cohort, 0)
        epoch.batch_progress.increment_started()
        self.within_round = True
        round = self.epoch_progress.current.processed
        hooks = RoundHooks(
            on_server_step=lambda optimizer: self._call("on_before_optimizer_step", optimizer),
            on_clients_done=self._show_progress,
        )
        # PyTorchProfiler counts steps by actions with this ending
        with trainer.profiler.profile("run_federated_round.training_step"), explain_step():
            report = self.federation.session.rounds.run(round, trainer.optimizers[0], hooks)
        self._count_optimizer_step()
        row: dict[str, Tensor | float] = {**report, "round": float(round)}
        if self._validated_names is not None and "train/loss" in row:  # the row has all names
            names, self._validated_names = [*self._validated_names, *row], None
            check_monitors(trainer, trainer.lightning_module, names, includes_rounds=True)
        epoch.batch_progress.increment_processed()
        epoch.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        loss = {"loss": row["train/loss"]} if "train/loss" in row else {}
        outputs, last = {**row, **loss}, self.max_batches - 1
        self._call("on_train_batch_end", outputs, cohort, last, monitoring=False)
        trainer._logger_connector.on_batch_end()
        self._log(row)
        self.within_round = False  # a checkpoint writes the round's row first
        self._call_callbacks("on_train_batch_end", outputs, cohort, last, monitoring=True)
        epoch.batch_progress.increment_completed()

    def _count_optimizer_step(self) -> None:
        """Count the step of the local optimizers, which the engine has taken."""
        for optimizer in self.trainer.optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]
        steps = self.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        steps.increment_ready()
        steps.increment_completed()

    def _log(self, row: dict[str, Tensor | float]) -> None:
        """Queue the round's row with the values of ``self.log``; write all rows if a log is due."""
        trainer, connector = self.trainer, self.trainer._logger_connector
        if trainer.log_every_n_steps:
            row = {"epoch": row["round"], **row, **self._read_logged_values()}
            for rows in self._row_queues:
                rows.add(row, self.epoch_loop._batches_that_stepped)
        if connector.should_update_logs:
            self.write_rows()

    def _read_logged_values(self) -> dict[str, Any]:
        """Return the values of ``self.log`` that loggers write; as a rule there are none."""
        connector = self.trainer._logger_connector
        return connector.metrics["log"] if connector.trainer._results else {}

    def write_rows(self) -> None:
        """Write the queued rows of all rounds to every logger."""
        for rows in self._row_queues:
            rows.write()

    def _call(self, hook: str, *args: Any, monitoring: bool | None = None) -> None:
        """Call a hook of the callbacks, by :meth:`_call_callbacks`, and of the module."""
        self._call_callbacks(hook, *args, monitoring=monitoring)
        if not _select_overriding([self.trainer.lightning_module], LightningModule, hook):
            return
        if _call_lightning_module_hook(self.trainer, hook, *args) == -1:
            raise ValueError(
                f"Expected `{hook}` not to return -1 but got -1: a round is one batch, and cannot"
                " be left out."
            )

    def _call_callbacks(self, hook: str, *args: Any, monitoring: bool | None = None) -> None:
        """Call a hook of the callbacks.

        Departs from Lightning: only callbacks that override the hook are called. Most override few
        hooks, and calls of the empty hooks would take 0.1 ms of each round.

        Args:
            hook: The name of the hook.
            *args: Its arguments, after the trainer and the module.
            monitoring: ``True`` calls only ``Checkpoint`` and ``EarlyStopping`` callbacks, which
                may monitor a metric; ``False`` calls only the others; ``None`` calls all.
        """
        trainer, module = self.trainer, self.trainer.lightning_module
        callbacks = _select_overriding(trainer.callbacks, Callback, hook)
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

    def _show_progress(self, num_done: int) -> None:
        """Update the progress bar within the round, at most every ``_BAR_SECONDS``."""
        now = time.monotonic()
        if now < self._bar_due or num_done == self.max_batches:  # the end of the round updates it
            return
        self._bar_due = now + _BAR_SECONDS
        bar, module = self.trainer.progress_bar_callback, self.trainer.lightning_module
        if bar is not None and getattr(bar, "is_enabled", True):
            bar.on_train_batch_end(self.trainer, module, {}, self._cohort, num_done - 1)


def _select_overriding(objects: Iterable[_Hooked], parent: type, hook: str) -> list[_Hooked]:
    """Return the objects that override a hook of the parent class, by themselves or their class."""
    inherited = getattr(parent, hook)
    return [
        instance
        for instance in objects
        if getattr(type(instance), hook, None) is not inherited or hook in vars(instance)
    ]


def _count_schedules_in_rounds(trainer: Trainer) -> None:
    """Make learning-rate schedules step once a round: a round is an epoch and a step."""
    for config in trainer.lr_scheduler_configs:
        config.interval = "epoch"
        if config.reduce_on_plateau and str(config.monitor).startswith("val/"):
            config.frequency = trainer.check_val_every_n_epoch or 1
