"""Kinds of state that a run keeps between rounds, as command lines."""

import shlex
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
FIT = [
    *("fit", "--config", str(ROOT / "configs/quickstart.yaml"), "--trainer.max_epochs", "12"),
    *("--trainer.check_val_every_n_epoch", "3", "--data.num_clients", "10"),
    *("--federation.sampler.cohort_size", "5"),
    *("--trainer.default_root_dir", "runs", "--trainer.logger", "false"),
    *("--trainer.enable_progress_bar", "false"),
]


def read_states() -> dict[str, list[str]]:
    """Return the options of each kind of state, from states.yaml beside this file."""
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    parts = content["parts"]
    return {
        name: [word for item in items for word in shlex.split(parts.get(item, item))]
        for name, items in content["states"].items()
    }


STATES = read_states()
