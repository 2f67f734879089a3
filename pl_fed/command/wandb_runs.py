"""Weights & Biases on the command line: offline and silent unless the environment says more."""

import os
import sys

SWEEP_ID = "WANDB_SWEEP_ID"
"""The environment variable that the agent of a W&B sweep sets for the runs that it starts."""


def prepare_wandb() -> None:
    """Set the defaults of W&B's environment: offline, without a question or a line of its own.

    The agent of a sweep waits for the metrics of its runs, so they stay online.
    """
    if SWEEP_ID not in os.environ:
        os.environ.setdefault("WANDB_MODE", "offline")
    if os.environ.get("WANDB_MODE") == "offline":
        os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_CONSOLE", "off")  # W&B would capture the progress bar


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
