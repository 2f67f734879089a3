"""``python -m pl_fed {fit,validate,test,predict}``."""

import contextlib
import copy
import shlex
import signal
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from pl_fed.arguments import check_writable
from pl_fed.callbacks import Introduction, Predictions, Summary
from pl_fed.command.messages import describe_full_disk
from pl_fed.command.program import program_name
from pl_fed.command.quiet_wandb import QuietWandb
from pl_fed.command.run_choice import (
    FinishedRunError,
    choose_evaluated_run,
    choose_requeued_run,
    choose_run,
    is_requeued,
)
from pl_fed.command.run_files import (
    CONFIG,
    active_loggers,
    class_entries,
    discard_unstarted_run,
    place_logger,
    saves_into_run_folder,
    wandb_loggers_in,
    write_slurm_job,
)
from pl_fed.command.saved_config import SaveAndLogConfig
from pl_fed.command.sections import SectionsCLI
from pl_fed.command.start_status import StartStatus
from pl_fed.command.wandb_runs import close_wandb_run, silence_wandb
from pl_fed.federation import Federation
from pl_fed.lightning.checkpoints import check_source, check_weights_only, local_path
from pl_fed.lightning.trainer import Trainer
from pl_fed.reports.configs import group_name, read_config
from pl_fed.run_folder import (
    LAST,
    SUMMARY,
    RunLock,
    StoredRun,
    is_first_process,
    last_checkpoint,
    new_folder,
)

_REMEDIES = {  # for Lightning's words, beside last
    "best": "set it to the file in `checkpoints/` of a run that your ModelCheckpoint names as best",
    "hpc": "pl_fed saves no checkpoint of this kind, so set it to last, or to the folder of a run",
}
_UNSAVED_METRICS = "metrics_before.csv"  # rounds before a restart, without a checkpoint


class FederatedCLI(SectionsCLI):
    """``python -m pl_fed {fit,validate,test,predict} --config x.yaml``.

    Args:
        args: List of arguments to parse; ``None`` uses the command line.
        lock: The lock of the folder of the run, if the caller has chosen it. A new run makes a new
            folder otherwise.
        callbacks: Callbacks of the trainer, beside those of the config.
    """

    def __init__(
        self,
        args: ArgsType = None,
        lock: RunLock | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.run_dir: Path | None = None
        # the absolute path of the run's folder: code of the user may change the current folder
        self._absolute_dir: Path | None = None
        self._lock = lock
        self._callbacks = callbacks
        self._ckpt_path: str | None = None
        with contextlib.ExitStack() as self._until_the_end:
            self._until_the_end.push(lambda kind, *_: close_wandb_run(failed=kind is not None))
            try:
                super().__init__(
                    save_config_callback=SaveAndLogConfig,
                    save_config_kwargs={"save_to_log_dir": False},  # it writes the file itself
                    parser_kwargs={"prog": program_name()},
                    args=args,
                )
            except FinishedRunError as finished:
                self.run_dir = finished.folder
                rank_zero_info(str(finished))
                return
            except BaseException as error:
                # Lightning ends a run with the status of a failure after Ctrl-C
                interrupt = error.__context__ if isinstance(error, SystemExit) else error
                if isinstance(interrupt, KeyboardInterrupt):
                    self._clean_up(interrupt)
                    raise SystemExit(128 + signal.SIGINT) from error
                self._clean_up(error)
                raise
            if getattr(self.trainer, "fast_dev_run", False):  # leaves no results
                discard_unstarted_run(self._absolute_dir)

    def _clean_up(self, error: BaseException) -> None:
        """Remove the folder of a run that did not start; explain how to resume a stopped run.

        Raises:
            OSError: If the disk is full; the original error does not name the run's folder.
        """
        discard_unstarted_run(self._absolute_dir)
        if self.run_dir is not None:
            files = f"the files of the run in {self.run_dir}"
            if text := describe_full_disk(error, files, self._name_restart(self.run_dir)):
                raise OSError(text) from error
        if isinstance(error, SIGTERMException):
            self._report_stop("SIGTERM")
        elif isinstance(error, KeyboardInterrupt):
            self._report_stop("Ctrl-C")

    def _name_restart(self, run_dir: Path) -> str:
        """Return the remedy of an error of the machine, such as a full disk, as an imperative."""
        if last_checkpoint(self._absolute_dir or run_dir):
            return f"resume from its last checkpoint: --ckpt_path {shlex.quote(str(run_dir))}"
        return "start the run again"

    def _report_stop(self, signal_name: str) -> None:
        """Report that a run was stopped, and how to resume it."""
        if not is_first_process():
            return
        stop = f"Stopped by {signal_name}"
        if self.run_dir is None or self._absolute_dir is None or not self._absolute_dir.is_dir():
            print(f"{stop} before a run started.", file=sys.stderr)
        else:
            print(f"{stop}. {self._describe_resume(self.run_dir)}", file=sys.stderr)

    def _describe_resume(self, run_dir: Path) -> str:
        """Return a text with the run's folder and, if possible, the command that resumes it."""
        folder = f"The run's folder is {run_dir}"
        run = StoredRun.read(self._absolute_dir or run_dir)
        if self.subcommand != "fit" or not isinstance(self._arguments, list):
            return f"{folder}."
        if run is None:
            return f"{folder}; it has no checkpoints/last.ckpt to resume from."
        arguments = _resume_arguments(self._arguments, run_dir)
        command = shlex.join([*program_name().split(), *arguments])
        start = ""
        if run.checkpoint is None:
            start = f" from {_read_start(run) or 'round 0'}, because it has no checkpoint yet"
        return f"{folder}. Resume the run{start}:\n  {command}"

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments without the checkpoint: Lightning would read arguments from it."""
        super().parse_arguments(parser, args)
        config = self.config[self.config.subcommand]
        path = self._ckpt_path = config.ckpt_path
        config.ckpt_path = None
        check_weights_only(config.get("weights_only"))
        if path is not None and path != LAST:
            _check_checkpoint(path)

    def before_instantiate_classes(self) -> None:
        """Restore the path of the checkpoint."""
        self.config[self.subcommand].ckpt_path = self._ckpt_path

    def instantiate_classes(self) -> None:
        """Instantiate all classes; loggers write into the run's folder."""
        self._status = StartStatus("Reading the data …")
        self._until_the_end.callback(self._status.stop)
        config = self.config[self.subcommand]
        root = config.trainer.default_root_dir or "runs"
        resumes, run = self.subcommand == "fit", self._choose_run(root)
        if is_first_process():  # only this process chooses the folder and writes into it
            self._lock_folder(run.folder if run and resumes else self._choose_folder(root))
            if resumes:
                self._prepare_folder(run, config)
        self._resumes = bool(run and resumes)
        if self._resumes or (resumes and config.ckpt_path == LAST):
            # the last checkpoint in the run's folder; without one, the run is as a new one, also in
            # a process that sees the folder that the first process has just made
            config.ckpt_path = _find_start(run)
        self._config_without_folder = self.config
        self.config = copy.deepcopy(self.config)
        config = self.config[self.subcommand]
        if run is not None:
            self._start_from(run, config)
        elif (
            self.subcommand != "fit"
            and config.ckpt_path is None
            and config.get("federation.initial_model") is None
        ):
            rank_zero_warn(
                f"{self.subcommand} uses untrained models, because `ckpt_path` is not set: set"
                " --ckpt_path to last, or to the folder of a run."
            )
        self._place_loggers(config)
        super().instantiate_classes()
        if self.run_dir is not None and wandb_loggers_in(config.trainer.logger):
            if self._resumes:  # a refused resume changes no file
                self.trainer.callbacks.insert(0, QuietWandb())  # type: ignore[attr-defined]
            else:
                silence_wandb()

    def _prepare_folder(self, run: StoredRun | None, config: Namespace) -> None:
        """Prepare the folder of a fit for its files.

        The folder of checkpoints tells that the run may restart. A run that begins with the
        checkpoint of a path gets it later, with its config, which has the path.
        """
        if run is None:
            write_slurm_job(self.run_dir)  # type: ignore[arg-type]
        else:
            check_writable(run_dir=run.folder)  # before the first change of a file
        may_restart = run is not None or config.ckpt_path in (None, LAST)
        if may_restart and saves_into_run_folder(config.trainer):
            (self.run_dir / "checkpoints").mkdir(exist_ok=True)  # type: ignore[operator]

    def _choose_run(self, root: str | Path) -> StoredRun | None:
        """Return the run that ``ckpt_path`` names, by ``last`` or its folder, or ``None``.

        A job that SLURM has requeued continues its run also without ``ckpt_path``, or with that of
        the checkpoint from which the run began.
        """
        path = self.config[self.subcommand].ckpt_path
        file = None if path in (None, LAST) else local_path(path)
        fits, is_run = self.subcommand == "fit", path == LAST or bool(file and file.is_dir())
        repeats = fits and not is_run and self._lock is None and is_requeued()
        if not is_run and not repeats:
            return None
        config = self.plain_config()
        if repeats:
            return choose_requeued_run(root, config, self.add_defaults)
        place = LAST if file is None else str(file)
        choose = choose_run if fits else choose_evaluated_run
        return choose(place, root, config, self.add_defaults)

    def _start_from(self, run: StoredRun, config: Namespace) -> None:
        """Start from a run's last checkpoint, or from round 0 if it has none; name the run."""
        if self.subcommand != "fit":
            config.ckpt_path = str(run.checkpoint)
            rank_zero_info(f"The models are those of {run.folder}.")
        elif run.checkpoint is not None:
            rank_zero_info(f"The run in {run.folder} goes on.")
        else:
            if self.run_dir:
                if (rows := self.run_dir / "metrics.csv").is_file():
                    rows.replace(self.run_dir / _UNSAVED_METRICS)
                (self.run_dir / SUMMARY).unlink(missing_ok=True)  # the run is not finished
            rank_zero_warn(
                f"{run.folder} was stopped before its first checkpoint, so it restarts from"
                f" {config.ckpt_path or 'round 0'}."
            )

    def _place_loggers(self, config: Namespace) -> None:
        """Direct the loggers of the config into the run's folder."""
        group = group_name(config.as_dict())
        config.trainer.logger = active_loggers(config.trainer.logger)
        for logger in class_entries(config.trainer.logger):
            if self._absolute_dir is not None:
                place_logger(logger, self._absolute_dir, group)

    def _choose_folder(self, root: str | Path) -> Path:
        """Return the folder of a new run."""
        return new_folder(root) if self._lock is None else self._lock.folder

    def _lock_folder(self, folder: Path) -> None:
        """Make a folder this run's, and lock it until the end against other processes."""
        if self._lock is None or self._lock.folder != folder:
            self._lock = RunLock(folder)
        self._until_the_end.enter_context(self._lock)
        self.run_dir, self._absolute_dir = folder, folder.absolute()

    def instantiate_trainer(self, **kwargs: Any) -> LightningTrainer:
        """Build the trainer that runs the federation."""
        self.config = self._config_without_folder  # config.yaml must not name this run's folder
        federation: Federation = self._get(self.config_init, "federation")
        self.trainer_class = Trainer
        run_dir = self._absolute_dir
        if self.run_dir is not None and self.run_dir.absolute() == run_dir:
            run_dir = self.run_dir  # as the user writes it
        trainer = super().instantiate_trainer(
            federation=federation, run_dir=run_dir, lock=self._lock, **kwargs
        )
        config = self.config[self.subcommand].as_dict()
        added: list[Callback] = [
            Introduction(federation, config, self.run_dir),
            Summary(federation, self.run_dir, self._next_command()),
        ]
        if self.subcommand == "predict":
            added.append(Predictions(self._absolute_dir or Path()))
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.insert(0, self._status)  # before any bar
        callbacks.extend([*added, *self._callbacks])
        return trainer

    def _next_command(self) -> str | None:
        """Return the command that compares the run with the others in its parent folder."""
        if self.run_dir is None:
            return None
        return shlex.join([*program_name().split(), "report", str(self.run_dir.parent)])

    def after_fit(self) -> None:
        """Test the final models."""
        self.trainer.test(self.model, datamodule=self.datamodule, verbose=False)


def _find_start(run: StoredRun | None) -> str | None:
    """Return the checkpoint of a run that goes on or restarts: ``last``, or a path; or ``None``.

    Raises:
        ValueError: If the checkpoint of the path is no longer there.
    """
    if run is not None and run.checkpoint is not None:
        return LAST
    if (start := _read_start(run)) is not None:
        _check_checkpoint(start)
    return start


def _read_start(run: StoredRun | None) -> str | None:
    """Return the checkpoint's path from which a run without a checkpoint of its own has begun.

    ``None`` if it began in round 0.
    """
    config = read_config(run.folder / CONFIG) if run else None
    start = (config or {}).get("ckpt_path")
    return start if isinstance(start, str) else None


def _check_checkpoint(path: str) -> None:
    """Raise ``ValueError`` if a path is neither a checkpoint, a folder, nor a URL."""
    if path:
        check_source(path)
    file = local_path(path)
    if file is None or (path and file.is_dir()) or zipfile.is_zipfile(file):
        return
    fault = "broken, or of another kind" if file.is_file() else "no such file"
    remedy = _REMEDIES.get(path, "set it to last, or to the folder of a run")
    raise ValueError(
        "Expected argument `ckpt_path` to be a checkpoint, last or the folder of a run but got"
        f" {path if path and path.isprintable() else repr(path)}: {fault}: {remedy}."
    )


def _resume_arguments(arguments: list[str], folder: Path) -> list[str]:
    """Return the arguments of a command line that resumes the run in a folder."""
    remaining, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith("--ckpt_path="):
            remaining.append(argument)
        skip = argument == "--ckpt_path" and not skip
        if skip:
            remaining.pop()
    return [*remaining, "--ckpt_path", str(folder)]
