"""The files of a run that the command line places and removes."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

CONFIG = "config.yaml"
"""The name of a run's config in its folder."""
SWEEP_ID = "WANDB_SWEEP_ID"
"""The environment variable that the agent of a W&B sweep sets for the runs that it starts."""
_RUN_ID = "wandb_run_id"  # a file in the run's folder: a resumed run is the same run
_UNSTARTED = {CONFIG, "checkpoints"}  # all that a run's folder holds before the first round


def discard_unstarted_run(run_dir: Path | None) -> None:
    """Remove the folder of a run that ended before it began: it holds no results.

    One that cannot be removed stays: what ended the run is worth more words.
    """
    if run_dir is None:
        return
    with contextlib.suppress(OSError):
        if not (run_dir / "wandb").exists():
            (run_dir / _RUN_ID).unlink(missing_ok=True)  # of no run of W&B
        if {path.name for path in run_dir.rglob("*")} <= _UNSTARTED:
            shutil.rmtree(run_dir)


def saves_into_run_folder(trainer: Namespace) -> bool:
    """Whether a run's checkpoints, if it has any, go into its own folder."""
    given = [each.get("init_args") or {} for each in class_entries(trainer.callbacks)]
    saves = trainer.enable_checkpointing is not False and not trainer.fast_dev_run
    return saves and not any(each.get("dirpath") for each in given)


def class_entries(logger: Any) -> Iterator[Namespace]:
    """Yield the loggers of a config that are given by class."""
    for each in logger if isinstance(logger, list) else [logger]:
        if isinstance(each, Namespace) and "class_path" in each:
            yield each


def place_logger(logger: Namespace, folder: Path, group: str | None = None) -> None:
    """Make a logger write under the run's folder, and W&B go on with the folder's run.

    Args:
        logger: The logger's class and arguments.
        folder: The run's folder.
        group: W&B's name for runs of the same config but for the seed, unless the user gave one.
    """
    arguments = logger.get("init_args")
    if arguments is None:
        return
    if "save_dir" in arguments:
        arguments.save_dir = str(folder / (arguments.save_dir or "."))
    if not logger.class_path.endswith("WandbLogger"):
        return
    for variable in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"):  # else these lie in the home folder
        os.environ.setdefault(variable, str((folder / "wandb").absolute()))
    if group and not arguments.get("group") and "WANDB_RUN_GROUP" not in os.environ:
        arguments.group = group
    if not arguments.get("id") and SWEEP_ID not in os.environ:  # a sweep gives its runs their ids
        file = folder / _RUN_ID
        if not file.exists():
            file.write_text(secrets.token_hex(4))
        arguments.id = file.read_text()
        arguments.resume = "allow"
