"""Files of a run that the command line creates and removes."""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from pl_fed.command.wandb_runs import SWEEP_ID, close_wandb_run
from pl_fed.files import replace_file

CONFIG = "config.yaml"
"""The name of a run's config in its folder."""
SLURM_JOB = "SLURM_JOB_ID"
"""The environment variable of SLURM with the id of a job, which its restarts keep."""
_RUN_ID = "wandb_run_id"  # file in the run's folder: a resumed run continues its W&B run
_JOB_ID = "slurm_job_id"  # file in the run's folder: a requeued job continues its run
_UNSTARTED = {CONFIG, "checkpoints", _RUN_ID, _JOB_ID}  # in a run's folder before its first round


def discard_unstarted_run(run_dir: Path | None) -> None:
    """Remove the folder of a run that stopped before its first round, and so has no results.

    Ignores errors of removal, so that the error that stopped the run is reported.
    """
    if run_dir is None:
        return
    with contextlib.suppress(OSError):
        wandb = run_dir / "wandb"
        if not wandb.exists():
            (run_dir / _RUN_ID).unlink(missing_ok=True)  # W&B has no such run yet
        contents = {path.name for path in run_dir.rglob("*") if wandb not in (path, *path.parents)}
        if contents <= _UNSTARTED:
            close_wandb_run(failed=True)
            shutil.rmtree(run_dir)


def write_slurm_job(run_dir: Path) -> None:
    """Write the id of the job of SLURM that starts a run into its folder, if there is one."""
    if job := os.environ.get(SLURM_JOB):
        with replace_file(run_dir / _JOB_ID) as temporary:
            temporary.write_text(job, encoding="utf-8")


def read_slurm_job(run_dir: Path) -> str | None:
    """Return the id of the job of SLURM that started the run in a folder, or ``None``."""
    try:
        return (run_dir / _JOB_ID).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def saves_into_run_folder(trainer: Namespace) -> bool:
    """Return whether a run saves checkpoints, all of them in its own folder."""
    arguments = [entry.get("init_args") or {} for entry in class_entries(trainer.callbacks)]
    saves = trainer.enable_checkpointing is not False and not trainer.fast_dev_run
    return saves and not any(callback.get("dirpath") for callback in arguments)


def class_entries(entries: Any) -> Iterator[Namespace]:
    """Yield the entries of a config with a ``class_path``: of a list, or of a single entry."""
    for entry in entries if isinstance(entries, list) else [entries]:
        if isinstance(entry, Namespace) and "class_path" in entry:
            yield entry


def active_loggers(loggers: Any) -> Any:
    """Return the loggers of a config without W&B if its environment variable disables it.

    Args:
        loggers: The argument ``trainer.logger``: a list, one logger, true, false or null.
    """
    if os.environ.get("WANDB_MODE") != "disabled":
        return loggers
    if isinstance(loggers, list):
        return [logger for logger in loggers if not _is_wandb(logger)]
    return None if _is_wandb(loggers) else loggers


def wandb_loggers_in(loggers: Any) -> list[Namespace]:
    """Return the W&B loggers of a config."""
    return [logger for logger in class_entries(loggers) if _is_wandb(logger)]


def _is_wandb(logger: Any) -> bool:
    return isinstance(logger, Namespace) and str(logger.get("class_path")).endswith("WandbLogger")


def place_logger(logger: Namespace, folder: Path, group: str | None = None) -> None:
    """Direct a logger into the run's folder; a W&B logger continues the folder's W&B run.

    Args:
        logger: The logger's class and arguments.
        folder: The run's folder.
        group: W&B group of runs that differ only by seed; a group in the config takes precedence.
    """
    arguments = logger.get("init_args")
    if arguments is None:
        return
    if "save_dir" in arguments:
        arguments.save_dir = str(folder / (arguments.save_dir or "."))
    if not _is_wandb(logger):
        return
    for variable in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"):  # W&B would use the home folder
        os.environ.setdefault(variable, str((folder / "wandb").absolute()))
    if group and not arguments.get("group") and "WANDB_RUN_GROUP" not in os.environ:
        arguments.group = group
    if not arguments.get("id") and SWEEP_ID not in os.environ:  # a sweep sets the ids of its runs
        arguments.id = _read_or_make_run_id(folder)
        arguments.resume = "allow"


def _read_or_make_run_id(folder: Path) -> str:
    """Return the id of the W&B run in a folder; a new one if its file is missing or damaged."""
    file, run_id = folder / _RUN_ID, ""
    with contextlib.suppress(OSError, ValueError):
        run_id = file.read_text(encoding="utf-8").strip()
    if not re.fullmatch(r"[\w-]+", run_id):
        run_id = secrets.token_hex(4)
        with replace_file(file) as temporary:
            temporary.write_text(run_id, encoding="utf-8")
    return run_id
