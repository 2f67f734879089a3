"""Graphics cards of this machine, and the cells that may use them."""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pl_fed.plain_yaml import load_yaml
from pl_fed.studies.changes import Change, find_layer, flatten_overrides

VISIBLE_CARDS = "CUDA_VISIBLE_DEVICES"
"""The environment variable that names the cards of a process."""

_ACCELERATOR = "trainer.accelerator"


def list_cards() -> tuple[str, ...]:
    """Return the graphics cards that this process may use, by their names in CUDA's variable."""
    import torch

    count = torch.cuda.device_count()
    names = os.environ.get(VISIBLE_CARDS)
    if names is None:
        return tuple(map(str, range(count)))
    return tuple(name.strip() for name in names.split(","))[:count]


def may_use_card(change: Change) -> bool:
    """Return whether runs of a config may use a card: ``trainer.accelerator`` is not cpu.

    Args:
        change: The config, as layers and overrides.
    """
    if _ACCELERATOR in change.overrides:
        return bool(change.overrides[_ACCELERATOR] != "cpu")
    for layer in reversed(change.layers):
        values = _read_layer(find_layer(layer))
        if _ACCELERATOR in values:
            return bool(values[_ACCELERATOR] != "cpu")
    return True


@cache
def _read_layer(path: Path) -> dict[str, Any]:
    """Return the values of a layer by the paths of arguments; none of an invalid file."""
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # the check of the config refuses it
        return {}
    return dict(flatten_overrides(content)) if isinstance(content, Mapping) else {}
