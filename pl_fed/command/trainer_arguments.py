"""Arguments of the trainer: refused with the path in the config before Lightning refuses them."""

from collections.abc import Mapping
from typing import Any

import torch

_ACCELERATORS = ("auto", "cpu", "cuda", "gpu", "mps")
_PROFILERS = ("simple", "advanced", "pytorch", "xla")


def check_trainer_arguments(trainer: Mapping[str, Any]) -> None:
    """Check the arguments of the section ``trainer`` with a short list of values.

    Args:
        trainer: The section, as nested dictionaries.

    Raises:
        ValueError: If a value is none of those that Lightning and a round can use.
    """
    accelerator, strategy = trainer.get("accelerator"), trainer.get("strategy")
    profiler, nodes = trainer.get("profiler"), trainer.get("num_nodes", 1)
    if isinstance(accelerator, str) and accelerator not in _ACCELERATORS:
        _refuse("accelerator", "auto, cpu or cuda", accelerator, "cpu")
    if isinstance(strategy, str) and strategy != "auto" and not strategy.startswith("ddp"):
        _refuse("strategy", "auto or ddp", strategy, "auto")
    if isinstance(profiler, str) and profiler not in _PROFILERS:
        _refuse("profiler", "simple, advanced or pytorch", profiler, "simple")
    if not isinstance(nodes, int) or nodes < 1:
        _refuse("num_nodes", "an integer of at least 1", nodes, 1)
    if "max_steps" in trainer and trainer["max_steps"] is None:
        _refuse("max_steps", "an integer of at least -1, for no limit,", None, -1)
    has_gpu = accelerator in ("cuda", "gpu") or torch.cuda.is_available()
    if not _is_device_choice(trainer.get("devices", "auto"), has_gpu):
        ids = (
            ", a number of at least 1 or a list of ids" if has_gpu else " or a number of at least 1"
        )
        _refuse("devices", f"auto{ids}", trainer["devices"], 1)


def _is_device_choice(devices: Any, has_gpu: bool) -> bool:
    """Return whether a value chooses devices: -1 and lists are for GPUs."""
    if devices == "auto" or not isinstance(devices, int | str | list):
        return True
    if isinstance(devices, list):
        return bool(devices) and has_gpu
    ids = str(devices).split(",")
    try:
        numbers = [int(text) for text in ids if text.strip()]
    except ValueError:
        return False
    if len(ids) > 1 or numbers == [-1]:
        return has_gpu and bool(numbers)
    return numbers[0] >= 1 if numbers else False


def _refuse(name: str, expected: str, value: Any, example: Any) -> None:
    got = "null" if value is None else value
    raise ValueError(
        f"Expected argument `trainer.{name}` to be {expected} but got {got}: set, for example,"
        f" {example}."
    )
