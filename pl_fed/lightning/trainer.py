"""Lightning's Trainer, whose epochs are rounds of a federation."""

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities import rank_zero_warn

from pl_fed.arguments import check_instances, check_integers
from pl_fed.callbacks import (
    EngineReport,
    LastCheckpoint,
    PerClient,
    PythonConfig,
    RoundMetrics,
    WandbAxis,
    WandbReport,
)
from pl_fed.clients.base import Client
from pl_fed.data.module import FederatedData
from pl_fed.distributed.processes import (
    Processes,
    announce_launcher,
    end_with_launcher,
    explain_lost_process,
)
from pl_fed.engine import Clipping, LocalSettings
from pl_fed.federation import Federation
from pl_fed.lightning.checkpoints import (
    AtomicCheckpointIO,
    check_source,
    check_weights_only,
    identity_in,
)
from pl_fed.lightning.compatibility import check_data, check_processes, check_trainer
from pl_fed.lightning.loop import FederatedLoop
from pl_fed.loggers import RunCSV
from pl_fed.rounds.identity import check_identity, federation_identity
from pl_fed.rounds.settings import RunSettings
from pl_fed.run_folder import (
    RunLock,
    check_holds_no_run,
    is_first_process,
    last_checkpoint,
    last_run,
    new_folder,
)


class Trainer(LightningTrainer):
    """Runs a federation as one Lightning fit.

    ``trainer.fit(client, data)``, ``validate``, ``test`` and ``predict`` are Lightning's own. A
    round is an epoch and a step: ``max_epochs`` or ``max_steps`` is the number of rounds.

    With several devices, nodes, or processes of a launcher (``strategy="ddp"``), the processes
    share the clients of each round. Results do not depend on their number. Each loads the data;
    the first chooses the run's folder, and writes all files.

    Args:
        federation: The federation.
        default_root_dir: Under it, each run has a new folder with all that it writes.
        run_dir: The run's folder; ``"last"`` takes the latest under ``default_root_dir`` that has a
            checkpoint, to be resumed by ``fit(..., ckpt_path="last")``.
        logger: Loggers beside ``metrics.csv``, which is always written; ``True`` and ``False`` add
            none.
        callbacks: See Lightning. Without a ``ModelCheckpoint``, and unless
            ``enable_checkpointing=False``, a :class:`~pl_fed.callbacks.LastCheckpoint` is added.
        plugins: See Lightning.
        log_every_n_steps: Every how many rounds the rows of all rounds since are written, to
            ``metrics.csv`` and to every logger; 1 by default. They are also written before a
            validation, before a checkpoint is saved, and in the end. 0 writes no ``train/*``.
        lock: The lock of ``run_dir``, if it is held already.
        **kwargs: All else that ``lightning.Trainer`` takes.

    Raises:
        ValueError: If ``barebones`` is asked for, or a strategy that a round cannot use.

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
        >>> sorted(trainer.callback_metrics)[:2]
        ['round', 'time/round']
    """

    def __init__(
        self,
        federation: Federation,
        *,
        default_root_dir: str | Path = "runs",
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
        self.run_dir = _folder(default_root_dir, run_dir)
        self._lock = lock or RunLock(self.run_dir)
        self._has_fitted = False
        others = [] if logger is None or isinstance(logger, bool) else logger
        loggers = [others] if isinstance(others, Logger) else list(others)
        added = plugins if isinstance(plugins, list) else [plugins] if plugins else []
        if not any(isinstance(plugin, CheckpointIO) for plugin in added):
            added = [*added, AtomicCheckpointIO()]
        given = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])
        saves = [each for each in given if isinstance(each, ModelCheckpoint)]
        late = any(each.save_last and each.monitor and not each.dirpath for each in saves)
        if (late or not saves) and kwargs.get("enable_checkpointing") is not False:
            given.append(LastCheckpoint())  # Lightning's last.ckpt is of the last of the best
        super().__init__(
            default_root_dir=str(self.run_dir),
            logger=[RunCSV(self.run_dir), *loggers],
            callbacks=[
                RoundMetrics(),
                WandbAxis(),
                PerClient(federation, self.run_dir),
                EngineReport(federation, self.run_dir),
                PythonConfig(federation, self.run_dir, kwargs),
                WandbReport(self.run_dir),
                *given,
            ],
            plugins=added,
            log_every_n_steps=every,
            **kwargs,
        )
        check_processes(self, bool(kwargs.get("sync_batchnorm")))
        self.processes = Processes(self.global_rank, self.world_size, self.num_devices)
        self._watch_launcher()
        if self.world_size > 1:  # what is logged is the same in all of them
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
            local=LocalSettings(self.precision_plugin.forward_context, clipping),
            limit_local_steps=None if limit == 1.0 and isinstance(limit, float) else limit,
            shuffle=not self.overfit_batches,  # type: ignore[attr-defined]
            rounds=self.estimated_stepping_batches,
            seconds_left=lambda: min(map(_seconds_left, timers), default=math.inf),
            processes=self.processes,
        )

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of rounds, for schedules that want to know it."""
        limits = [n for n in (self.max_epochs, self.max_steps) if n is not None and n >= 0]
        return min(limits, default=float("inf"))

    def _watch_launcher(self) -> None:
        """Let the processes that Lightning starts end with the one that starts them."""
        environment = getattr(self.strategy, "cluster_environment", None)
        if self.world_size > 1 and isinstance(environment, LightningEnvironment):
            if environment.creates_processes_externally and environment.local_rank():
                end_with_launcher()
            elif not environment.creates_processes_externally:
                announce_launcher()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Keep other runs out of the folder, and say in a sentence if a process is lost."""
        with self._lock, explain_lost_process(self.processes):
            yield

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
            weights_only: ``None`` or ``True``, which are the same here.

        Raises:
            FileNotFoundError: If ``ckpt_path`` is ``"last"`` and the run's folder has none.
            TypeError: If the model is not a :class:`Client`.
            ValueError: If the trainer, a callback or the model asks for what a round cannot honour,
                another process is at work in the run's folder, that holds another run, or
                ``weights_only`` is ``False``.
        """
        check_trainer(self, model)
        check_data(datamodule)
        path = self._checkpoint(ckpt_path)
        if datamodule is not None and (saved := identity_in(path)):  # before loggers begin
            check_identity(
                saved, federation_identity(model, datamodule.clients, self.federation.seed)
            )
        check_weights_only(weights_only)
        with self._at_work():
            if path is None and self.is_global_zero and not self._has_fitted:
                check_holds_no_run(self.run_dir)
            self._has_fitted = True
            super().fit(model, datamodule=datamodule, ckpt_path=path, weights_only=True)

    def validate(  # type: ignore[override]
        self,
        model: Client | None = None,
        dataloaders: FederatedData | None = None,
        ckpt_path: str | Path | None = None,
        **kwargs: Any,
    ) -> Any:
        """See ``lightning.Trainer.validate``; ``ckpt_path`` as in :meth:`fit`."""
        path = self._evaluated(model, ckpt_path)
        with self._at_work():
            return super().validate(model, dataloaders, path, **_loading_weights_only(kwargs))

    def test(  # type: ignore[override]
        self,
        model: Client | None = None,
        dataloaders: FederatedData | None = None,
        ckpt_path: str | Path | None = None,
        **kwargs: Any,
    ) -> Any:
        """See ``lightning.Trainer.test``; ``ckpt_path`` as in :meth:`fit`."""
        path = self._evaluated(model, ckpt_path)
        with self._at_work():
            return super().test(model, dataloaders, path, **_loading_weights_only(kwargs))

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
        path = self._evaluated(model, ckpt_path)
        settings = _loading_weights_only(kwargs)
        with explain_lost_process(self.processes):
            return super().predict(
                model, dataloaders, datamodule, return_predictions, path, **settings
            )

    def _evaluated(self, client: Client | None, asked: str | Path | None) -> str | Path | None:
        """Return which checkpoint is meant; warn if clients' own models are held elsewhere."""
        before = getattr(getattr(client, "_trainer", None), "federation", self.federation)
        if not isinstance(client, Client) or before is self.federation:
            return self._checkpoint(asked)
        if asked is None and client.state_defaults():
            rank_zero_warn(
                f"{type(client).__name__} was at work in another Federation, which has its clients'"
                " own models: here they are as they were at first. Take that Federation, or give"
                " `ckpt_path`."
            )
        return self._checkpoint(asked)

    def _checkpoint(self, asked: str | Path | None) -> str | Path | None:
        """Return which checkpoint is meant."""
        self.loads = asked is not None
        if asked is not None:
            check_source(asked)
        if asked != "last":
            return asked
        if not is_first_process():
            return self.run_dir / "last.ckpt"  # the first process says which
        found = last_checkpoint(self.run_dir)
        if found is None:
            raise FileNotFoundError(
                'Expected argument `ckpt_path` = "last" to find checkpoints/last.ckpt in'
                f" {self.run_dir} but found none: to take the latest run, make the trainer with"
                ' run_dir="last".'
            )
        return found

    def save_checkpoint(
        self,
        filepath: str | Path,
        weights_only: bool | None = None,
        storage_options: Any = None,
    ) -> None:
        """Save a checkpoint: see ``lightning.Trainer.save_checkpoint``.

        In the middle of a round, which ends with the hooks ``on_train_batch_end``, none is written,
        and a warning says so: the clients that are done would be ahead of the server. Every process
        must call it; so none is written either when one of several has failed.
        """
        alone = self.interrupted and self.world_size > 1 and not self._loop.ends_together
        if self._loop.within_round or alone:
            rank_zero_warn(
                f"No checkpoint is written to {filepath} in the middle of round"
                f" {self.current_epoch}: the one before is kept."
            )
            return
        self._loop.write_rows()  # a resumed run goes on after the rows up to its checkpoint
        super().save_checkpoint(filepath, weights_only, storage_options)


def _seconds_left(timer: Timer) -> float:
    """Return how long a run may still take by its timer; infinity without a limit."""
    left = timer.time_remaining()
    return math.inf if left is None else max(0.0, left)


def _loading_weights_only(settings: dict[str, Any]) -> dict[str, Any]:
    """Return an evaluation's settings, by which no checkpoint runs code.

    Raises:
        ValueError: If ``weights_only`` is ``False``.
    """
    check_weights_only(settings.get("weights_only"))
    return {**settings, "weights_only": True}


def _folder(root: str | Path, run_dir: str | Path | None) -> Path:
    if run_dir in (None, "last") and not is_first_process():
        return Path(root)  # where nothing is written
    if run_dir is None:
        return new_folder(root)
    if str(run_dir) == "last":
        return last_run(root)
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    return Path(run_dir)
