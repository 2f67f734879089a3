"""``config.yaml`` in a run's folder, and its differences from another config."""

from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_warn

from pl_fed.command.run_files import CONFIG
from pl_fed.reports.configs import find_differences, format_value

_LENGTHS = {f"trainer.max_{name}" for name in ("epochs", "steps", "time")}  # a resume may raise
_PROCESSES = {f"trainer.{name}" for name in ("devices", "num_nodes", "strategy")}


class SaveAndLogConfig(SaveConfigCallback):
    """Callback that writes ``config.yaml`` and logs the config to every logger.

    A resumed run writes its config after loading the checkpoint, because loading may fail. If the
    config has changed, the callback keeps the previous one as ``config_to_round_<n>.yaml``.
    """

    _resumes = False

    def setup(self, trainer: LightningTrainer, pl_module: LightningModule, stage: str) -> None:
        """Write the config of a new run."""
        if stage == "fit" and self.config.ckpt_path == "last":
            self._resumes = True
            self.config = self.config.clone()
            self.config.ckpt_path = None  # a fit with the saved config starts a new run
        if not self._resumes:
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Write the config of a resumed run."""
        if trainer.is_global_zero and not self.already_saved:
            self._keep_previous(Path(trainer.default_root_dir), trainer.current_epoch)
        super().setup(trainer, pl_module, "fit")

    def on_fit_end(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Warn if the resumed run was already finished, under another config."""
        if not self._resumes or self.already_saved or not trainer.is_global_zero:
            return
        if changes := config_changes(Path(trainer.default_root_dir) / CONFIG, self._plain_config()):
            rank_zero_warn(
                f"The run was already finished, so this config ({changes}) trains nothing and the"
                " test uses the models of the previous config: raise `trainer.max_epochs`, or start"
                " a new run without `--ckpt_path`."
            )

    def _keep_previous(self, folder: Path, round: int) -> None:
        """Keep the previous config if the new one differs, and warn with the differences.

        If the folder already has a previous config for this round, ``config.yaml`` belongs to an
        attempt without a saved round, and is not kept.
        """
        previous = folder / f"config_to_round_{round}.yaml"
        before = previous if previous.exists() else folder / CONFIG
        if changes := config_changes(before, self._plain_config()):
            before.rename(previous)
            rank_zero_warn(
                f"The run resumes with another config from round {round} on ({changes}). The"
                f" previous config is in {previous.name}. Learning rates stay those of the"
                " checkpoint."
            )
        else:
            previous.unlink(missing_ok=True)  # config.yaml is the same again

    def save_config(
        self, trainer: LightningTrainer, pl_module: LightningModule, stage: str
    ) -> None:
        """Log the config."""
        config = self._plain_config()
        for logger in trainer.loggers:
            logger.log_hyperparams(config)

    def _plain_config(self) -> dict[str, Any]:
        """Return the config in the form of ``config.yaml``."""
        config: dict[str, Any] = yaml.safe_load(self.parser.dump(self.config, skip_none=False))
        return config


def config_changes(file: Path, config: dict[str, Any]) -> str:
    """Describe the differences of a config from a config file.

    Returns an empty text if only the length of training differs, or if the file cannot be read.
    """
    changes = _differences(file, config)
    if changes.keys() <= _LENGTHS:
        return ""
    return ", ".join(
        f"{key} {format_value(saved)} → {format_value(value)}"
        for key, (saved, value) in changes.items()
    )


def is_config_of(file: Path, config: dict[str, Any]) -> bool:
    """Return whether a config differs from a config file in its length or its processes only."""
    return _differences(file, config).keys() <= _LENGTHS | _PROCESSES


def _differences(file: Path, config: dict[str, Any]) -> dict[str, list[Any]]:
    try:
        saved: dict[str, Any] | None = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {} if saved is None else find_differences([saved, config])
