"""The run of one cell in this process."""

import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_fed.command.fit import FederatedCLI
from pl_fed.command.messages import describe_file_error, explain_full_disk
from pl_fed.command.run_files import wandb_loggers_in
from pl_fed.isolation import isolate
from pl_fed.run_folder import RunLock, last_checkpoint
from pl_fed.studies.cell_configs import check_config, describe_changes
from pl_fed.studies.cell_folder import LOG, OTHER_ROUND, CellFolder, CellRecord, State
from pl_fed.studies.jobs import RunJob, RunOutcome
from pl_fed.text import first_line

_RESTART = "start the study again"
_QUIET = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")


class StudyLabels(Callback):
    """Study labels: logs the name of the study and the labels of the cell to every logger.

    Args:
        record: The record of the cell.
    """

    def __init__(self, record: CellRecord) -> None:
        self.labels = {"study": record.study, **record.values}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log the labels at the start of a fit."""
        if stage == "fit":
            for logger in trainer.loggers:
                logger.log_hyperparams(self.labels)


class CellCLI(FederatedCLI):
    """Cell CLI: ``python -m pl_fed fit`` in the folder of a cell.

    Args:
        args: The command line.
        lock: The lock of the folder.
        record: The record of the cell; W&B groups the cells of a study, and names runs by cells.
    """

    def __init__(self, args: list[str], lock: RunLock, record: CellRecord) -> None:
        self.record = record
        self._best_round: ModelCheckpoint | None = None
        super().__init__(args, lock=lock, callbacks=[StudyLabels(record)])

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the trainer; it keeps the models of the best round, if the study tests them."""
        trainer = super().instantiate_trainer(**kwargs)
        if self.record.best:
            metric, mode = self.record.best
            if "personal" not in self.model.evaluated:
                metric = metric.replace("/personal/", "/global/", 1)
            self._best_round = ModelCheckpoint(
                monitor=metric,
                mode=mode,
                filename="best",
                save_on_train_epoch_end=False,  # before last.ckpt, which has its scores
            )
            trainer.callbacks.append(self._best_round)  # type: ignore[attr-defined]
        return trainer

    def after_fit(self) -> None:
        """Test the models of the last round, or of the best one; a trial of a tuning is not tested.

        Raises:
            ValueError: If no validation has chosen a round.
        """
        if not self.record.tested:
            return None
        if self._best_round is None:
            return super().after_fit()
        best = self._best_round.best_model_path
        if not best:
            raise ValueError(
                f"Expected argument `options.best` to be a metric of a validation but got"
                f" {self._best_round.monitor} and no validation: set"
                " `trainer.check_val_every_n_epoch` to at most the number of rounds."
            )
        self.trainer.test(self.model, datamodule=self.datamodule, verbose=False, ckpt_path=best)
        return None

    def _name_restart(self, run_dir: Path) -> str:
        return _RESTART

    def _place_loggers(self, config: Namespace) -> None:
        for logger in wandb_loggers_in(config.trainer.logger):
            arguments = logger.get("init_args")
            arguments.group = arguments.get("group") or self.record.study
            arguments.name = arguments.get("name") or self.record.cell
        super()._place_loggers(config)


def run_cell(job: RunJob) -> RunOutcome:
    """Run a cell, or resume its run; does nothing if it is done, or another process has it.

    The run has failed if the files of its folder cannot be written, for example on a full disk.

    Args:
        job: The cell.
    """
    started = time.monotonic()
    files = f"the files of the run in {Path(job.root) / job.path}"
    try:
        with explain_full_disk(files, _RESTART):
            return _run_alone(job, started)
    except OSError as error:
        return RunOutcome(State.FAILED, time.monotonic() - started, _type_and_message(error))


def _run_alone(job: RunJob, started: float) -> RunOutcome:
    """Run a cell if no other process has it: see :func:`run_cell`."""
    folder, record = CellFolder(Path(job.root), job.path), CellRecord(**job.record)
    with folder.lock() as is_alone:
        if not is_alone:
            return RunOutcome(State.RUNNING)
        note = _prepare(folder, record, job)
        if state := folder.read_result():
            return RunOutcome(state, note="by another process")
        error = _fit(folder, record, job.arguments)
        state = folder.read_result() or State.FAILED
        error = "" if state.is_result else error or "the run did not finish"
        folder.change_record(error=error)
        if state.is_result and not job.keep_checkpoints:
            folder.remove_checkpoints()
    return RunOutcome(state, time.monotonic() - started, error, note)


def _prepare(folder: CellFolder, record: CellRecord, job: RunJob) -> str:
    """Move a run of another config aside, and remove a run without a result or a checkpoint.

    Returns:
        A note about a folder moved aside; empty without one.
    """
    note = ""
    has_rounds = folder.read_summary() or folder.has_checkpoint
    has_record = folder.config.is_file() or folder.read_record() is not None
    if has_rounds and has_record and (reason := _find_mismatch(folder, record, job)):
        note = f"the earlier run is in {folder.move_aside()} ({reason})"
    if folder.read_result() is None and not folder.has_checkpoint:
        folder.clear()
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_record(record)
    return note


def _find_mismatch(folder: CellFolder, record: CellRecord, job: RunJob) -> str:
    """Return why a run must not continue; empty if it may."""
    if job.restart:
        return "its attempt failed"
    before = folder.read_record()
    if before is not None and before.digest == record.digest:
        return ""
    if before is not None and list(before.best) != list(record.best):
        return OTHER_ROUND
    return describe_changes(folder.config, check_config(job.arguments))


def _fit(folder: CellFolder, record: CellRecord, arguments: list[str]) -> str:
    """Run the fit of a cell; its output goes to ``log.txt``.

    Returns:
        The error in one line; empty without one.
    """
    words = ["fit", *arguments, *_QUIET, f"--trainer.default_root_dir={folder.root}"]
    if last_checkpoint(folder.path):
        words += ["--ckpt_path", str(folder.path)]
    with isolate(), redirect_output(folder.path / LOG):
        try:
            CellCLI(words, RunLock(folder.path), record)
        except SystemExit as stop:
            return f"the command line ended with status {stop.code}"
        except Exception as error:
            with suppress(OSError):  # on a full disk, the log has no place for it
                traceback.print_exc()
            return _type_and_message(error)
    return ""


def _type_and_message(error: Exception) -> str:
    """Return an error's type, and the first line of its message or the sentence about its file."""
    text = describe_file_error(error).rstrip(".") or first_line(error)
    return f"{type(error).__name__}: {text}"


@contextmanager
def redirect_output(path: Path) -> Iterator[None]:
    """Append all output of this process and its children to a file."""
    saved = {number: os.dup(number) for number in (1, 2)}
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        _replace_output(dict.fromkeys(saved, file))
        yield
    finally:
        _replace_output(saved)
        for number in (file, *saved.values()):
            os.close(number)


def _replace_output(files: Mapping[int, int]) -> None:
    """Let the standard streams write to other files."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # on a full disk: the streams must be restored
            stream.flush()
    for number, file in files.items():
        os.dup2(file, number)


def check_cell(arguments: list[str], root: Path, folders: Mapping[str, int]) -> dict[str, Any]:
    """Check the config of a cell, and compare it with that of earlier runs.

    Args:
        arguments: The words of the cell's command line, without its seed.
        root: The folder of the study.
        folders: The folders of the earlier runs, and their seeds.

    Returns:
        The differences by folder, for the folders that differ.

    Raises:
        InvalidCellError: If the config is invalid.
    """
    checked = check_config(arguments)
    changes = {}
    for path, seed in folders.items():
        checked.config.seed_everything = seed
        if difference := describe_changes(CellFolder(root, path).config, checked):
            changes[path] = difference
    return changes
