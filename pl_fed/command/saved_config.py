"""``config.yaml`` in a run's folder, and how a config differs from it."""

from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_warn

from pl_fed.command.run_files import CONFIG
from pl_fed.reports.configs import find_differences, format_value

_LENGTHS = {f"trainer.max_{name}" for name in ("epochs", "steps", "time")}  # may be raised


class SaveAndLogConfig(SaveConfigCallback):
    """Writes ``config.yaml``, and gives the whole config to every logger.

    That of a run that goes on is written when its checkpoint has been taken, which may be refused.
    If it is another than before, the other one is kept as ``config_to_round_<n>.yaml``.
    """

    _resumes = False

    def setup(self, trainer: LightningTrainer, pl_module: LightningModule, stage: str) -> None:
        """Write the config of a new run."""
        if stage == "fit" and self.config.ckpt_path == "last":
            self._resumes = True
            self.config = self.config.clone()
            self.config.ckpt_path = None  # a fit by the config that is written is another run
        if not self._resumes:
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Write the config of a run that goes on."""
        if trainer.is_global_zero and not self.already_saved:
            self._keep_previous(Path(trainer.default_root_dir), trainer.current_epoch)
        super().setup(trainer, pl_module, "fit")

    def on_fit_end(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Say so if a run was whole already, and the config is another than that of the run."""
        if not self._resumes or self.already_saved or not trainer.is_global_zero:
            return
        if changes := config_changes(Path(trainer.default_root_dir) / CONFIG, self._plain_config()):
            rank_zero_warn(
                f"The run was whole, so that nothing is trained by this config ({changes}): the"
                " models that are tested are those of the config before. To train with this one,"
                " raise `trainer.max_epochs`, or begin a run without `ckpt_path`."
            )

    def _keep_previous(self, folder: Path, round: int) -> None:
        """Keep the config that is there, if the new one is another, and say what differs.

        If one is kept for this round, no round that counts was run by the one that is there.
        """
        kept = folder / f"config_to_round_{round}.yaml"
        before = kept if kept.exists() else folder / CONFIG
        if changes := config_changes(before, self._plain_config()):
            before.rename(kept)
            rank_zero_warn(
                f"The run goes on with another config from round {round} on ({changes}); the one"
                f" before is kept in {kept.name}. Learning rates stay those of the checkpoint."
            )
        else:
            kept.unlink(missing_ok=True)  # it is written again

    def save_config(
        self, trainer: LightningTrainer, pl_module: LightningModule, stage: str
    ) -> None:
        """Log the config."""
        config = self._plain_config()
        for logger in trainer.loggers:
            logger.log_hyperparams(config)

    def _plain_config(self) -> dict[str, Any]:
        """Return the config as ``config.yaml`` holds it."""
        config: dict[str, Any] = yaml.safe_load(self.parser.dump(self.config, skip_none=False))
        return config


def config_changes(file: Path, config: dict[str, Any]) -> str:
    """Return how a config differs from one; nothing if by lengths only, or that cannot be read."""
    try:
        old: dict[str, Any] | None = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return ""
    changes = {} if old is None else find_differences([old, config])
    if changes.keys() <= _LENGTHS:
        return ""
    return ", ".join(
        f"{key} {format_value(before)} → {format_value(after)}"
        for key, (before, after) in changes.items()
    )
