"""The run that a command continues or evaluates: ``--ckpt_path last`` or the folder of a run."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from pl_fed.command.run_files import CONFIG, SLURM_JOB, read_slurm_job
from pl_fed.command.saved_config import (
    PREVIOUS_CONFIG,
    Completion,
    find_changes,
    find_model_changes,
    is_longer,
)
from pl_fed.lightning.checkpoints import read_round
from pl_fed.run_folder import LAST, StoredRun, find_runs, name_other_checkpoint, no_run_error

_MAX_LISTED = 5  # most runs in a sentence
_SLURM_RESTARTS = "SLURM_RESTART_COUNT"  # environment variable of SLURM


class FinishedRunError(Exception):
    """Finished run: a fit has nothing to do, because the run has ended under this config.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"{folder} is already finished under this config: nothing is left to train, and its"
            " files stay as they are. To train on, raise the limit that ended it, such as"
            " `trainer.max_epochs` or `trainer.max_time`."
        )
        self.folder = folder


@dataclass(frozen=True)
class Candidate:
    """Candidate: a run that a fit may continue.

    Attributes:
        run: The run.
        changes: The differences of the command's config from the run's, other than length and
            processes; empty if the configs match.
        is_longer: Whether the command's config asks for more rounds than the run's.
    """

    run: StoredRun
    changes: str
    is_longer: bool

    @classmethod
    def compare(cls, run: StoredRun, config: dict[str, Any], complete: Completion) -> "Candidate":
        """Compare a run with the config of a command."""
        file = _find_config(run)
        unknown = run.checkpoint is None and not file.exists()  # stopped within its start
        changes = "" if unknown else find_changes(file, config, complete)
        return cls(run, changes, is_longer(file, config))

    @property
    def matches(self) -> bool:
        """Whether the run continues under this config, and no results of it are overwritten."""
        return not self.changes and (self.is_longer or not self.run.is_finished)

    def __str__(self) -> str:
        """The run's folder, its state and the differences of the configs."""
        state = "already finished" if self.run.is_finished else "unfinished"
        return f"{self.run.folder} ({'; '.join(filter(None, (state, self.changes)))})"


def _find_config(run: StoredRun) -> Path:
    """Return the config of a run's saved rounds.

    A resume under another config that saved no round has left its own as ``config.yaml``.
    """
    if run.checkpoint is not None and any(run.folder.glob(PREVIOUS_CONFIG.format("*"))):
        previous = run.folder / PREVIOUS_CONFIG.format(read_round(run.checkpoint))
        if previous.is_file():
            return previous
    return run.folder / CONFIG


def choose_run(
    path: str, root: str | Path, config: dict[str, Any], complete: Completion
) -> StoredRun | None:
    """Return the run that a fit continues; ``None`` if ``last`` finds no run at all.

    ``last`` is the newest unfinished run with the command's config. If there is none, it is the
    newest finished run with this config and fewer rounds. A folder is that of the run in it, also
    with another config; a finished run then needs the same config with more rounds.

    As with Lightning, ``last`` begins a new run where there is none: a job that is restarted has
    one command for its first start and all others.

    Args:
        path: ``last``, or the folder of a run.
        root: The parent folder of the runs.
        config: The config of the command, in the form of ``config.yaml``.
        complete: Adds defaults to the config of a run of an earlier version.

    Raises:
        FileNotFoundError: If there are runs or checkpoints, but none that could continue.
        FinishedRunError: If the run has ended under this config.
        ValueError: If no run can continue under this config.
    """
    if path != LAST:
        return _choose_folder(Path(path), config, complete)
    candidates = [Candidate.compare(run, config, complete) for run in find_runs(root)]
    if not candidates:
        if any(Path(root).glob(f"*/{CONFIG}")) or name_other_checkpoint(root):
            raise no_run_error(root)
        rank_zero_warn(
            f"`ckpt_path` = last finds no run under {Path(root).absolute()}, so a new run begins."
        )
        return None
    matching = [candidate for candidate in candidates if candidate.matches]
    unfinished = [candidate for candidate in matching if not candidate.run.is_finished]
    if matching:
        return [*unfinished, *matching][0].run
    _leave_finished_run(candidates)
    raise ValueError(
        f"Expected argument `ckpt_path` = last to find an unfinished run with this config under"
        f" {root} but got {_list(candidates)}, so this config trains nothing: set `ckpt_path` to"
        " the folder of an unfinished run to continue it under this config, or leave it out to"
        " start a new run."
    )


def is_requeued() -> bool:
    """Return whether SLURM has restarted this job.

    It repeats the command after a requeue signal, a preemption or the failure of a node, and counts
    the restarts.
    """
    return bool(os.environ.get(_SLURM_RESTARTS, "").strip("0"))


def choose_requeued_run(
    root: str | Path, config: dict[str, Any], complete: Completion
) -> StoredRun | None:
    """Return the run that an earlier start of this job of SLURM has begun.

    Args:
        root: The parent folder of the runs.
        config: The config of the command, in the form of ``config.yaml``.
        complete: Adds defaults to the config of a run of an earlier version.

    Returns:
        The run; ``None`` if the job has none with this config.

    Raises:
        FinishedRunError: If the job has finished the run already.
    """
    job = os.environ.get(SLURM_JOB)
    runs = [run for run in find_runs(root) if job and read_slurm_job(run.folder) == job]
    candidates = [Candidate.compare(run, config, complete) for run in runs]
    unfinished = [candidate.run for candidate in candidates if candidate.matches]
    if not unfinished:
        _leave_finished_run(candidates)
    return next(iter(unfinished), None)


def _choose_folder(folder: Path, config: dict[str, Any], complete: Completion) -> StoredRun:
    """Return the run in a folder."""
    candidate = Candidate.compare(read_run(folder), config, complete)
    run, changes = candidate.run, candidate.changes
    if candidate.matches or not (run.is_finished or (run.checkpoint is None and changes)):
        return run
    _leave_finished_run([candidate])
    if run.checkpoint is None:
        raise ValueError(
            f"Expected the config of {folder} to restart this run, which was stopped before its"
            f" first checkpoint, but got another ({changes}): start a new run without `ckpt_path`."
        )
    raise ValueError(
        "Expected argument `ckpt_path` to be the folder of an unfinished run, or of a finished one"
        f" with the same config and fewer rounds, but got {candidate}, so this config trains"
        f" nothing: to train on in a new folder, set `ckpt_path` to {run.checkpoint}."
    )


def _leave_finished_run(candidates: Sequence[Candidate]) -> None:
    """Raise ``FinishedRunError`` if a run has ended under the same config, with as many rounds."""
    for candidate in candidates:
        if not candidate.changes and candidate.run.is_finished:
            raise FinishedRunError(candidate.run.folder)


def read_run(folder: Path) -> StoredRun:
    """Return the run in a folder.

    Raises:
        ValueError: If the folder holds no run.
    """
    run = StoredRun.read(folder)
    if run is None:
        is_inner = StoredRun.read(folder.parent) is not None
        remedy = f" Give {folder.parent} instead." if is_inner else name_other_checkpoint(folder)
        raise ValueError(
            "Expected argument `ckpt_path` to be a checkpoint, last or the folder of a run but got"
            f" {folder}: a folder without checkpoints/last.ckpt.{remedy}"
        )
    return run


def choose_evaluated_run(
    path: str, root: str | Path, config: dict[str, Any], complete: Completion
) -> StoredRun:
    """Return the run to evaluate: one with the config of the command if there is one.

    Args:
        path: ``last``, the newest run, or the folder of a run.
        root: The parent folder of the runs.
        config: The config of the command, in the form of ``config.yaml``.
        complete: Adds defaults to the config of a run of an earlier version.

    Raises:
        FileNotFoundError: If there is no run with a checkpoint.
        ValueError: If the folder holds no run, or its run has no checkpoint.
    """
    runs = find_runs(root) if path == LAST else [read_run(Path(path))]
    saved = {run.folder: run for run in runs if run.checkpoint is not None}
    if not saved:
        raise no_run_error(root if path == LAST else path)
    changes = {
        folder: find_model_changes(_find_config(run), config, complete)
        for folder, run in saved.items()
    }
    folder = next((folder for folder, change in changes.items() if not change), next(iter(saved)))
    if changes[folder]:
        rank_zero_warn(
            f"The models of {folder} were trained under another config ({changes[folder]})."
        )
    return saved[folder]


def _list(candidates: Sequence[Candidate]) -> str:
    """Describe runs, the newest first."""
    more = len(candidates) - _MAX_LISTED
    texts = [*map(str, candidates[:_MAX_LISTED]), *([f"{more} older"] if more > 0 else [])]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
