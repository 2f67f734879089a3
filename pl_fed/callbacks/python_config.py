"""``python_config.yaml``: what a run from Python was made of, so that reports can name it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

from pl_fed.configurable import class_record, plain_value
from pl_fed.federation import Federation
from pl_fed.reports.configs import PYTHON_CONFIG, find_differences

_LENGTHS = {f"trainer.max_{name}" for name in ("epochs", "steps", "time")}  # raised as one likes
_HEAD = "# Describes the objects of a run from Python, for reports: no config to fit by.\n"


class PythonConfig(Callback):
    """Describes a run from Python in the form of a config; a config of the command line stays.

    A run that goes on with other objects keeps the description before it, as
    ``config_to_round_<n>.yaml``.

    Args:
        federation: The federation.
        folder: The run's folder.
        arguments: What the trainer was given.
    """

    def __init__(self, federation: Federation, folder: Path, arguments: Mapping[str, Any]) -> None:
        self.federation = federation
        self.folder = folder
        self.arguments = {
            name: plain_value(name, value)
            for name, value in arguments.items()
            if isinstance(value, bool | int | float | str)
        }

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the description, when a checkpoint has been taken, which may be refused."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        has_config = any(isinstance(each, SaveConfigCallback) for each in callbacks)
        dry = getattr(trainer, "fast_dev_run", False)
        if has_config or dry or not trainer.is_global_zero:
            return
        path, config = self.folder / PYTHON_CONFIG, self._described(pl_module)
        if path.is_file() and trainer.current_epoch:
            before = yaml.safe_load(path.read_text(encoding="utf-8"))
            if find_differences([before, config]).keys() - _LENGTHS:
                path.rename(self.folder / f"config_to_round_{trainer.current_epoch}.yaml")
        text = _HEAD + yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        path.write_text(text, encoding="utf-8")

    def _described(self, client: LightningModule) -> dict[str, Any]:
        seed = os.environ.get("PL_GLOBAL_SEED")
        return {
            "seed_everything": int(seed) if seed else None,
            "model": class_record(client),
            "data": self.federation.datamodule.constructor_arguments,
            "federation": self.federation.constructor_arguments,
            "trainer": self.arguments,
        }
