"""Weights & Biases on the command line: offline and silent unless the environment says more."""

import contextlib
import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pl_fed.command.shipped_configs import resolve_config_names

SWEEP_ID = "WANDB_SWEEP_ID"
"""The environment variable that the agent of a W&B sweep sets for the runs that it starts."""
_LOGGER = "--trainer.logger"


def prepare_wandb() -> None:
    """Set the defaults of W&B's environment: offline, without a question or a line of its own.

    The agent of a sweep waits for the metrics of its runs, so they stay online.
    """
    if SWEEP_ID not in os.environ:
        os.environ.setdefault("WANDB_MODE", "offline")
    if os.environ.get("WANDB_MODE") == "offline":
        os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_CONSOLE", "off")  # W&B would capture the progress bar


def import_wandb_first(arguments: Sequence[str]) -> None:
    """Import W&B, if a run is likely to use it, before PyTorch and Lightning.

    For each of its classes, W&B looks through all modules that Python has loaded. That takes a
    tenth of a second before PyTorch's modules, and more than a second after them.

    Args:
        arguments: The command line without the program's name.
    """
    texts = list(resolve_config_names(arguments))
    if is_logger_off(texts) or os.environ.get("WANDB_MODE") == "disabled":
        return
    for word in tuple(texts):
        with contextlib.suppress(OSError, ValueError):
            texts.append(Path(word.removeprefix("--config=")).read_text(encoding="utf-8"))
    if any("WandbLogger" in text for text in texts):
        prepare_wandb()
        with contextlib.suppress(ImportError):
            importlib.import_module("wandb.apis.public")


def is_logger_off(arguments: Sequence[str]) -> bool:
    """Return whether a command line turns off the loggers of its configs.

    Args:
        arguments: The command line without the program's name.

    Example:
        >>> is_logger_off(["fit", "--config", "quickstart", "--trainer.logger", "false"])
        True
        >>> is_logger_off(["fit", "--trainer.logger=false", "--trainer.logger.project=mine"])
        False
    """
    words = [word for argument in arguments for word in argument.split("=", 1)]
    settings = [pair for pair in itertools.pairwise(words) if pair[0].startswith(_LOGGER)]
    return bool(settings) and settings[-1] in {(_LOGGER, "false"), (_LOGGER, "null")}


def silence_wandb() -> None:
    """Let an offline W&B read its environment now, before its first warning."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and os.environ.get("WANDB_SILENT") == "true":
        wandb.setup()


def close_wandb_run(failed: bool = False) -> None:
    """Finish the W&B run of this process, if there is one.

    Args:
        failed: Whether to mark the run as failed.
    """
    wandb = sys.modules.get("wandb")
    run = getattr(wandb, "run", None)
    if run is not None:
        run.finish(exit_code=int(failed))
