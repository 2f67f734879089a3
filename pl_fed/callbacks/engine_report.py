"""The engine and its measured speeds: ``engine.json``, and hyperparameters of every logger."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from pl_fed.federation import Federation
from pl_fed.files import replace_file


class EngineReport(Callback):
    """Engine report: the engine in use, the clients that it trains at once, and measured speeds.

    It is written after the first round and after each change of the engine, and logged as a
    hyperparameter.

    Args:
        federation: The federation.
        folder: The run's folder; ``None`` writes no file.
    """

    def __init__(self, federation: Federation, folder: Path | None = None) -> None:
        self.federation = federation
        self.folder = folder
        self._reported: str | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let a new fit report its engine again."""
        self._reported = None

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Report the engine if it is a new one."""
        engine = self.federation.engine_choice
        if engine.current == self._reported or not trainer.is_global_zero:
            return
        self._reported = engine.current
        report = {
            "engine": engine.current,
            "clients_at_a_time": engine.size,
            "microseconds_per_step": {n: round(1e6 * s.step) for n, s in engine.speeds.items()},
        }
        if self.folder is not None and not getattr(trainer, "fast_dev_run", False):
            text = json.dumps(report, indent=1) + "\n"
            with replace_file(self.folder / "engine.json") as temporary:
                temporary.write_text(text, encoding="utf-8")
        for logger in trainer.loggers:
            logger.log_hyperparams({"engine": report})
