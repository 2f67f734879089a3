"""``python_config.yaml``: a description of a run from Python, for reports."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_warn

from pl_fed.configurable import add_defaults, class_record, default_arguments, plain_value
from pl_fed.federation import Federation
from pl_fed.files import replace_file
from pl_fed.plain_yaml import dump_yaml
from pl_fed.reports.configs import PYTHON_CONFIG, find_differences, list_changes, read_config

_LENGTHS = {f"trainer.max_{name}" for name in ("epochs", "steps", "time")}  # may be raised
_HEADER = "# Describes the objects of a run from Python, for reports: no config for a fit.\n"

KEPT_OPTIONS = (
    "Options of optimizers and schedules, such as learning rates, stay those of the checkpoint."
)
"""The options of a config that a resumed run does not take from it, in a sentence."""


class PythonConfig(Callback):
    """Config of a run from Python: a description of its objects in the form of a config.

    Runs from the command line have a config already, so nothing is written. If a run resumes with
    other objects, a warning names the differences, and the earlier description is kept as
    ``config_to_round_<n>.yaml``. An argument that an earlier version did not have is no difference
    if it has its default.

    Args:
        federation: The federation.
        folder: The run's folder.
        arguments: The trainer's arguments.
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
        """Write the description, after the trainer has accepted any checkpoint."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        has_config = any(isinstance(callback, SaveConfigCallback) for callback in callbacks)
        is_dry_run = getattr(trainer, "fast_dev_run", False)
        if has_config or is_dry_run or not trainer.is_global_zero:
            return
        _log_hyperparameters(trainer, pl_module)
        path, config = self.folder / PYTHON_CONFIG, self._describe(pl_module)
        trained = trainer.global_step
        earlier = self.folder / f"config_to_round_{trained}.yaml"
        # beside it, the other one belongs to an attempt without a saved round
        source = earlier if earlier.is_file() else path
        if trained and (before := read_config(source)):  # unless it was damaged
            before = add_defaults(before, config, self._defaults())
            changes = find_differences([before, config])
            if changes.keys() - _LENGTHS:
                source.rename(earlier)
                rank_zero_warn(
                    f"The run resumes with other arguments from round {trained} on"
                    f" ({list_changes(changes)}). The previous ones are in {earlier.name}."
                    f" {KEPT_OPTIONS}"
                )
            else:
                earlier.unlink(missing_ok=True)  # the arguments are the same again
        text = _HEADER + dump_yaml(config)
        with replace_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def _defaults(self) -> dict[str, Any]:
        """Return the defaults of the sections without a class path."""
        sections = {"data": self.federation.session.datamodule, "federation": self.federation}
        return {name: default_arguments(type(section)) for name, section in sections.items()}

    def _describe(self, client: LightningModule) -> dict[str, Any]:
        seed = os.environ.get("PL_GLOBAL_SEED")
        return {
            "seed_everything": int(seed) if seed else None,
            "model": class_record(client),
            "data": self.federation.session.datamodule.constructor_arguments,
            "federation": self.federation.constructor_arguments,
            "trainer": self.arguments,
        }


def _log_hyperparameters(trainer: Trainer, client: Any) -> None:
    """Log the hyperparameters that the LightningModule of a client saves, as a plain fit does."""
    net = client.global_model
    if getattr(net, "_log_hyperparams", False):
        for logger in trainer.loggers:
            logger.log_hyperparams(net.hparams_initial)
