"""Lightning's Trainer for federations: an epoch is a communication round."""

import math
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities import rank_zero_warn

from pl_fed.arguments import check_instances, check_integers
from pl_fed.callbacks import (
    EngineReport,
    LastCheckpoint,
    MovedFolder,
    Participation,
    PerClient,
    PythonConfig,
    RoundMetrics,
    RoundProgress,
    RunSummary,
    WandbAxis,
    WandbReport,
)
from pl_fed.callbacks.last_checkpoint import keep_in_folder
from pl_fed.callbacks.summary import Summary
from pl_fed.clients.base import Client
from pl_fed.data.module import FederatedData
from pl_fed.distributed.processes import (
    Processes,
    announce_launcher,
    end_launched_processes,
    end_with_launcher,
    explain_lost_process,
    limit_meeting,
)
from pl_fed.engine import Clipping, LocalSettings
from pl_fed.federation import Federation
from pl_fed.isolation import take_turn
from pl_fed.lightning.checkpoints import (
    AtomicCheckpointIO,
    check_source,
    check_weights_only,
    local_path,
    read_identity,
    read_round,
)
from pl_fed.lightning.compatibility import (
    check_data,
    check_processes,
    check_run_of_callbacks,
    check_trainer,
    choose_accelerator,
    warn_of_idle_processes,
)
from pl_fed.lightning.loop import FederatedLoop
from pl_fed.lightning.meeting import meet_patiently
from pl_fed.loggers import (
    RunCSV,
    begin_own_wandb_runs,
    postpone_experiments,
    refuse_shared_file,
)
from pl_fed.rounds.identity import check_identity, check_model_identity, federation_identity
from pl_fed.rounds.local_training import count_most_steps
from pl_fed.rounds.settings import RunSettings
from pl_fed.run_folder import (
    RunLock,
    holds_run,
    holds_run_error,
    is_first_process,
    last_checkpoint,
    last_run,
    new_folder,
)
from pl_fed.tasks.one_process import hide_in_steps


class Trainer(LightningTrainer):
    """Trainer: runs a federation as one Lightning fit.

    ``trainer.fit(client, data)``, ``validate``, ``test`` and ``predict`` are Lightning's own. A
    round is an epoch and a step: ``max_epochs`` or ``max_steps`` is the number of rounds.

    With several devices, nodes, or processes of a launcher (``strategy="ddp"``), the processes
    share the clients of each round. Results do not depend on the number of processes. Each process
    loads the data; the first process chooses the run's folder and writes all files.

    Args:
        federation: The federation.
        default_root_dir: Parent of the runs' folders; each run creates a new folder for its files.
            ``None`` is ``runs``.
        run_dir: The run's folder. ``"last"`` selects the latest folder under ``default_root_dir``
            with a checkpoint; resume it by ``fit(..., ckpt_path="last")``.
        logger: Loggers in addition to ``metrics.csv``, which is always written; ``True`` and
            ``False`` add none.
        callbacks: See Lightning. A :class:`~pl_fed.callbacks.LastCheckpoint` is added if there is
            no ``ModelCheckpoint``, unless ``enable_checkpointing=False``; and a
            :class:`~pl_fed.callbacks.RoundProgress` if there is no progress bar, unless
            ``enable_progress_bar=False``.
        plugins: See Lightning.
        log_every_n_steps: Number of rounds, at least 0, after which their rows are written to
            ``metrics.csv`` and every logger; 1 by default. Rows are also written before a
            validation, before a checkpoint is saved, and at the end. 0 writes no ``train/*``.
        lock: The lock of ``run_dir``, if the caller holds it already.
        **kwargs: All other arguments of ``lightning.Trainer``. ``accelerator="auto"`` takes the CPU
            where Lightning would choose Apple's MPS, which has no float64 numbers.

    Raises:
        ValueError: If ``barebones`` is ``True``, or a round cannot use the strategy or the
            accelerator.

    Example:
        >>> import tempfile, torch, pl_fed
        >>> from pl_fed import clients, data, models, partitioners, samplers
        >>> client = clients.Ditto(models.MLP(64, [32], 10), lam=1.0)
        >>> digits = data.FederatedData(data.Digits(), partitioners.Shards(2), num_clients=10)
        >>> federation = pl_fed.Federation(samplers.Uniform(5))
        >>> trainer = pl_fed.Trainer(
        ...     federation, default_root_dir=tempfile.mkdtemp(), max_epochs=1, accelerator="cpu",
        ...     enable_progress_bar=False, enable_model_summary=False)
        >>> trainer.fit(client, digits)
        >>> sorted(trainer.callback_metrics)[:4]
        ['bytes/down', 'bytes/up', 'round', 'time/round']
    """

    _counts_local_steps = False

    def __init__(
        self,
        federation: Federation,
        *,
        default_root_dir: str | Path | None = "runs",
        run_dir: str | Path | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        callbacks: list[Callback] | Callback | None = None,
        plugins: Any = None,
        log_every_n_steps: int | None = None,
        lock: RunLock | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("barebones"):
            raise ValueError(
                "Expected trainer argument `barebones` to be False but got True: metrics.csv is"
                " always written. To save time, turn off checkpoints, progress bar and summary."
            )
        check_instances(Federation, federation=federation)
        every = 1 if log_every_n_steps is None else log_every_n_steps
        check_integers(0, log_every_n_steps=every)
        self.federation = federation
        self.run_dir = _choose_run_dir(default_root_dir, run_dir)
        self._lock = lock or RunLock(self.run_dir)
        self._has_fitted = False
        self._began_anew: bool | None = None  # no run was in the folder before the first stage
        user_loggers = [] if logger is None or isinstance(logger, bool) else logger
        loggers = [user_loggers] if isinstance(user_loggers, Logger) else list(user_loggers)
        refuse_shared_file(loggers, self.run_dir)
        all_plugins = plugins if isinstance(plugins, list) else [plugins] if plugins else []
        if not any(isinstance(plugin, CheckpointIO) for plugin in all_plugins):
            all_plugins = [*all_plugins, AtomicCheckpointIO()]
        user_callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])
        checkpoints = [c for c in user_callbacks if isinstance(c, ModelCheckpoint)]
        for checkpoint in checkpoints:
            keep_in_folder(checkpoint)
        # with a monitor, Lightning's last.ckpt is the last one of the best checkpoints
        lags = any(c.save_last and c.monitor and not c.dirpath for c in checkpoints)
        lacks_last = not any(isinstance(checkpoint, LastCheckpoint) for checkpoint in checkpoints)
        needs_last = lacks_last and (lags or not checkpoints)
        if needs_last and kwargs.get("enable_checkpointing") is not False:
            user_callbacks.append(LastCheckpoint())
        # behind other checkpoints of a round: last.ckpt has their scores of this round
        user_callbacks.sort(key=lambda callback: isinstance(callback, LastCheckpoint))
        has_bar = any(isinstance(callback, ProgressBar) for callback in user_callbacks)
        shows_progress = kwargs.get("enable_progress_bar") is not False and not has_bar
        arguments = dict(kwargs)
        super().__init__(
            default_root_dir=str(self.run_dir),
            logger=[RunCSV(self.run_dir), *loggers],
            callbacks=[
                *([RoundProgress(federation)] if shows_progress else []),
                MovedFolder(
                    self.run_dir, _folder_as_written(self.run_dir, run_dir or default_root_dir)
                ),
                WandbReport(self.run_dir),
                RunSummary(federation, self.run_dir),  # removed before the row of a test
                RoundMetrics(),
                WandbAxis(),
                Participation(federation),
                PerClient(federation, self.run_dir),
                EngineReport(federation, self.run_dir),
                PythonConfig(federation, self.run_dir, arguments),
                *user_callbacks,
            ],
            plugins=all_plugins,
            log_every_n_steps=every,
            accelerator=choose_accelerator(kwargs.pop("accelerator", "auto")),
            **kwargs,  # as it is: LightningCLI then lists the options of Lightning's trainer
        )
        check_processes(self, bool(arguments.get("sync_batchnorm")))
        self.processes = Processes(self.global_rank, self.world_size, self.num_devices)
        if self.world_size == 1 and not is_first_process():
            _warn_of_rank(self.run_dir)
        self._watch_launcher()
        meet_patiently(self.strategy)
        if self.world_size > 1:  # all processes log the same values
            warnings.filterwarnings("ignore", ".*recommended to use .*sync_dist=True")
        self._loop = self.fit_loop = FederatedLoop(self, federation)
        if self.max_epochs in (None, -1) and self.max_steps >= 0:
            self.fit_loop.max_epochs = self.max_steps

    def run_settings(self) -> RunSettings:
        """Return the settings of a run that this trainer decides."""
        value, algorithm = self.gradient_clip_val, self.gradient_clip_algorithm
        clipping = Clipping(
            value if value and value > 0 else None, algorithm.value if algorithm else "norm"
        )
        limit = self.limit_train_batches
        timers = [callback for callback in self.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]
        return RunSettings(
            local=LocalSettings(
                self.precision_plugin.forward_context, clipping, self.accumulate_grad_batches
            ),
            limit_local_steps=None if limit == 1.0 and isinstance(limit, float) else limit,
            shuffle=not self.overfit_batches,  # type: ignore[attr-defined]
            rounds=self._max_rounds,
            seconds_left=lambda: min(map(_seconds_left, timers), default=math.inf),
            processes=self.processes,
        )

    @property
    def logger(self) -> Logger | None:
        """The first logger of the user, for the ``experiment`` of modules; else ``metrics.csv``."""
        users = [logger for logger in self.loggers if not isinstance(logger, RunCSV)]
        return next(iter([*users, *self.loggers]), None)

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [] if logger is None else [logger]

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of rounds, for schedules of epochs; in :meth:`count_local_steps`, of steps."""
        return self.estimated_local_steps if self._counts_local_steps else self._max_rounds

    @contextmanager
    def count_local_steps(self) -> Iterator[None]:
        """Count local steps within the context, for the schedule of a module with steps."""
        before, self._counts_local_steps = self._counts_local_steps, True
        try:
            yield
        finally:
            self._counts_local_steps = before

    @property
    def _max_rounds(self) -> int | float:
        limits = [n for n in (self.max_epochs, self.max_steps) if n is not None and n >= 0]
        return min(limits, default=float("inf"))

    @property
    def estimated_local_steps(self) -> int | float:
        """The largest number of local steps of a client in all rounds, for schedules of steps.

        Raises:
            ValueError: If clients count epochs, with ``federation.privacy``: one client's number of
                samples would change the learning rates of all others.
        """
        client: Any = self.lightning_module
        works = map(client.objective.work, client.objective.trained)
        if self.federation.privacy is not None and any(work.steps is None for work in works):
            raise ValueError(
                "Expected a schedule of local steps with a number of its own for"
                " `federation.privacy`, because the samples of the largest client would change the"
                " learning rates of all others, but got one that reads the trainer's number: set"
                " `model.local_steps`, give the schedule a number, or set interval to epoch."
            )
        datamodule: Any = self.datamodule  # type: ignore[attr-defined]
        rule = self.run_settings().build_batch_rule(datamodule)
        most = count_most_steps(client.objective, rule, datamodule.clients.train.sizes)
        return self._max_rounds * most

    def _watch_launcher(self) -> None:
        """Make the processes that Lightning starts end with their launcher."""
        environment = getattr(self.strategy, "cluster_environment", None)
        if self.world_size > 1 and isinstance(environment, LightningEnvironment):
            if environment.creates_processes_externally and environment.local_rank():
                end_with_launcher()
            elif not environment.creates_processes_externally:
                announce_launcher()

    @contextmanager
    def _hold_run_dir(self) -> Iterator[None]:
        """Lock the run's folder; see :meth:`_watch_processes`."""
        with self._lock, self._watch_processes():
            if self._began_anew is None:
                self._began_anew = not (self.is_global_zero and holds_run(self.run_dir))
            begin_own_wandb_runs(self, self.run_dir)
            yield

    @contextmanager
    def _watch_processes(self) -> Iterator[None]:
        """End all processes if one is lost or fails, and explain the loss in one sentence.

        Afterwards, the data's processes that read ahead end, too. Runs in other threads wait.
        """
        limit_meeting(self.processes)
        launched = end_launched_processes(self.strategy.launcher)
        try:
            with take_turn(), launched, explain_lost_process(self.processes):
                yield
        finally:
            data = getattr(self, "datamodule", None)
            if isinstance(data, FederatedData):
                data.end_workers()

    def fit(  # type: ignore[override]
        self,
        model: Client,
        datamodule: FederatedData | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Run the rounds: see ``lightning.Trainer.fit``.

        Args:
            model: The algorithm.
            datamodule: The clients' data.
            ckpt_path: A checkpoint to resume from; ``"last"`` is the one in the run's folder.
            weights_only: ``None`` or ``True``; both mean ``True``.

        Raises:
            FileNotFoundError: If ``ckpt_path`` is ``"last"`` and the run has no checkpoint.
            TypeError: If the model is not a :class:`~pl_fed.clients.Client`.
            ValueError: If a round cannot honour a setting of the trainer, a callback or the model;
                another process uses the run's folder, or it contains another run; a callback has
                the scores of another run; or ``weights_only`` is ``False``.
        """
        check_trainer(self, model)
        check_data(datamodule)
        warn_of_idle_processes(self.world_size, datamodule.num_clients if datamodule else None)
        path = self._resolve_checkpoint(ckpt_path)
        if datamodule is not None and (saved := read_identity(path)):  # before loggers begin
            check = check_model_identity if self.federation.match_clients else check_identity
            check(saved, federation_identity(model, datamodule.clients, self.federation.seed))
        self._check_rounds(read_round(path))
        check_weights_only(weights_only)
        with self._hold_run_dir():
            if not (self._has_fitted or self._began_anew or self._may_go_on(path)):
                raise holds_run_error(self.run_dir)
            check_run_of_callbacks(self, loads=path is not None)
            self._has_fitted = True
            if path is not None:
                postpone_experiments(self.loggers)
            super().fit(model, datamodule=datamodule, ckpt_path=path, weights_only=True)

    def _may_go_on(self, path: str | Path | None) -> bool:
        """Return whether a checkpoint goes on in the run's folder: one of another run does not."""
        file = None if path is None else local_path(path)
        if file is None:
            return path is not None
        folders = file.resolve().parents
        return self.run_dir.resolve() in folders or not any(map(holds_run, folders[:2]))

    def _check_rounds(self, finished: int | None) -> None:
        """Refuse to resume after more rounds than the run has; warn of an attack after them."""
        rounds = self._max_rounds
        self.federation.byzantine_clients.warn_of_late_start(rounds)
        if finished is not None and finished > rounds:
            name = "max_steps" if self.max_steps == rounds else "max_epochs"
            raise ValueError(
                f"Expected argument `trainer.{name}` to be at least {finished}, the number of"
                f" rounds in the checkpoint, but got {rounds}: raise it, or start a new run."
            )

    def validate(  # type: ignore[override]
        self,
        model: Client | None = None,
        dataloaders: FederatedData | None = None,
        ckpt_path: str | Path | None = None,
        **kwargs: Any,
    ) -> Any:
        """See ``lightning.Trainer.validate``; ``ckpt_path`` as in :meth:`fit`."""
        path = self._evaluation_checkpoint(model, ckpt_path)
        with self._hold_run_dir():
            options = _require_weights_only(self._print_once(kwargs))
            return super().validate(model, dataloaders, path, **options)

    def test(  # type: ignore[override]
        self,
        model: Client | None = None,
        dataloaders: FederatedData | None = None,
        ckpt_path: str | Path | None = None,
        **kwargs: Any,
    ) -> Any:
        """See ``lightning.Trainer.test``; ``ckpt_path`` as in :meth:`fit`."""
        path = self._evaluation_checkpoint(model, ckpt_path)
        with self._hold_run_dir():
            options = _require_weights_only(self._print_once(kwargs))
            return super().test(model, dataloaders, path, **options)

    def _print_once(self, options: dict[str, Any]) -> dict[str, Any]:
        """Leave out Lightning's table of results if a ``Summary`` prints its own."""
        callbacks: list[Callback] = self.callbacks  # type: ignore[attr-defined]
        prints = any(isinstance(callback, Summary) for callback in callbacks)
        return {**options, "verbose": False} if prints else options

    def predict(  # type: ignore[override]
        self,
        model: Client | None = None,
        dataloaders: FederatedData | None = None,
        datamodule: FederatedData | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        **kwargs: Any,
    ) -> Any:
        """See ``lightning.Trainer.predict``; ``ckpt_path`` as in :meth:`fit`."""
        path = self._evaluation_checkpoint(model, ckpt_path)
        settings = _require_weights_only(kwargs)
        with self._watch_processes():
            return super().predict(
                model, dataloaders, datamodule, return_predictions, path, **settings
            )

    def _evaluation_checkpoint(
        self, client: Client | None, ckpt_path: str | Path | None
    ) -> str | Path | None:
        """Return the checkpoint to load; warn if the clients' own models are not at hand."""
        if ckpt_path is None and isinstance(client, Client) and client.state_defaults():
            self._warn_of_lost_models(client)
        return self._resolve_checkpoint(ckpt_path)

    def _warn_of_lost_models(self, client: Client) -> None:
        """Warn if another federation has the clients' models, or this one has replaced them."""
        name, previous = type(client).__name__, getattr(client, "_trainer", None)
        if previous is None:
            return
        if getattr(previous, "federation", self.federation) is not self.federation:
            rank_zero_warn(
                f"Another Federation has trained {name} and has its clients' own models: here they"
                " are untrained. Use that Federation, or set `ckpt_path`."
            )
        elif self.federation.has_replaced(client) and {*client.evaluated} - {"global"}:
            rank_zero_warn(
                f"This Federation has run another {type(self.federation.client).__name__} since the"
                f" fit of this {name}, and no longer has its clients' own models: here they are"
                " untrained. Set `ckpt_path`, or use one Federation for each algorithm."
            )

    def _resolve_checkpoint(self, ckpt_path: str | Path | None) -> str | Path | None:
        """Return the checkpoint to load: the given one, or the run's last checkpoint."""
        self.loads = ckpt_path is not None
        if ckpt_path is not None:
            check_source(ckpt_path)
        if ckpt_path != "last":
            return ckpt_path
        if not is_first_process():
            return self.run_dir / "last.ckpt"  # replaced by the path of the first process
        path = last_checkpoint(self.run_dir)
        if path is None:
            raise FileNotFoundError(
                'Expected argument `ckpt_path` = "last" to find checkpoints/last.ckpt in'
                f" {self.run_dir} but found none: to use the latest run, create the trainer with"
                ' run_dir="last".'
            )
        return path

    def save_checkpoint(
        self,
        filepath: str | Path,
        weights_only: bool | None = None,
        storage_options: Any = None,
    ) -> None:
        """Save a checkpoint: see ``lightning.Trainer.save_checkpoint``.

        In the middle of a round, this writes no checkpoint but warns, because the trained clients
        would be ahead of the server. A round ends with the hooks ``on_train_batch_end``. Every
        process must call this method, so it also writes none after one of several has failed.
        """
        has_failed = self.interrupted and self.world_size > 1 and not self._loop.ends_together
        if self._loop.within_round or has_failed:
            rank_zero_warn(
                f"No checkpoint is written to {filepath} in the middle of round"
                f" {self.current_epoch}: the previous checkpoint is kept."
            )
            return
        self._loop.write_rows()  # a resumed run continues after the rows of its checkpoint
        super().save_checkpoint(filepath, weights_only, storage_options)


hide_in_steps(
    Trainer,
    world_size=1,
    num_devices=1,
    num_nodes=1,
    is_global_zero=True,
    global_rank=0,
    local_rank=0,
    node_rank=0,
)


def _seconds_left(timer: Timer) -> float:
    """Return the time left for a run by its timer, in seconds; infinity without a limit."""
    seconds = timer.time_remaining()
    return math.inf if seconds is None else max(0.0, seconds)


def _require_weights_only(settings: dict[str, Any]) -> dict[str, Any]:
    """Return an evaluation's settings with ``weights_only=True``: no checkpoint runs code.

    Raises:
        ValueError: If ``weights_only`` is ``False``.
    """
    check_weights_only(settings.get("weights_only"))
    return {**settings, "weights_only": True}


def _warn_of_rank(run_dir: Path) -> None:
    """Warn that a run of one process has the environment of a process of another node."""
    name = "NODE_RANK" if os.environ.get("NODE_RANK") else "GROUP_RANK"
    rank_zero_warn(
        f"The environment variable {name} = {os.environ.get(name)} is that of a process that makes"
        f" no folder, but this run has one process: its files are in {run_dir} without a lock, and"
        f" may replace those of another run. Unset {name}, or set `trainer.num_nodes`."
    )


def _folder_as_written(folder: Path, argument: str | Path | None) -> Path:
    """Return the run's folder as a user writes it: relative, if the argument is."""
    return folder if Path(argument or "").is_absolute() else Path(os.path.relpath(folder))


def _choose_run_dir(root: str | Path | None, run_dir: str | Path | None) -> Path:
    """Return the absolute path of the run's folder; create it if it is new.

    A later change of the current folder, as in a notebook or by a callback, does not matter.
    """
    root = Path(root or "runs").absolute()  # a config may have null
    if run_dir in (None, "last") and not is_first_process():
        return root  # this process writes nothing
    if run_dir is None:
        return new_folder(root)
    if str(run_dir) == "last":
        return last_run(root)
    folder = Path(run_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
