"""``checkpoints/last.ckpt``: written during a fit at a limited cost, and at its end."""

import re
import time
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging

from pl_fed.arguments import check_at_most, check_positive


class LastCheckpoint(ModelCheckpoint):
    """Last checkpoint: a single file with the latest saved round.

    It is the default of a trainer without a ``ModelCheckpoint``. Its folder exists from the start
    of a fit, so an empty folder marks a run that stopped before its first checkpoint.

    A checkpoint holds the states of all clients, so saving may take longer than a round. Rounds
    are skipped until saving takes at most ``share`` of the time. The last round is always saved as
    it ends, so that the file depends on no clock. After an error, or a signal between two rounds,
    the last completed round is saved.

    Beside Lightning's ``WeightAveraging``, every round is saved as it ends, and nothing later. That
    callback replaces the model by the average for validations and at the end of training.

    Args:
        share: The largest share of the time that saving may take, in (0, 1]; 1 saves each round.

    Raises:
        ValueError: If ``share`` is out of range.
    """

    def __init__(self, share: float = 0.05) -> None:
        check_positive(share=share)
        check_at_most(1, share=share)
        super().__init__(
            filename="last", enable_version_counter=False, save_on_train_epoch_end=True
        )
        self.share = share
        self._due = 0.0
        self._training = False
        self._averages = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Create the folder of a fit; nothing is trained yet."""
        with warnings.catch_warnings():  # a resumed run has checkpoints in its folder
            warnings.filterwarnings("ignore", ".*exists and is not empty")
            super().setup(trainer, pl_module, stage)
        writes = trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False)
        if stage == "fit" and writes and self.dirpath is not None:
            Path(self.dirpath).mkdir(parents=True, exist_ok=True)
        self._training = False
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._averages = any(isinstance(callback, WeightAveraging) for callback in callbacks)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, without Lightning's warning about the other folder of an evaluation."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The dirpath has changed")
            super().load_state_dict(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the first round be saved."""
        super().on_train_start(trainer, pl_module)
        self._due, self._training = 0.0, True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the round if enough time has passed since the last checkpoint.

        A round that is known to be the last one is always saved.
        """
        started = time.monotonic()
        due = self._averages or started >= self._due or _ends(trainer, pl_module)
        if trainer.strategy.reduce_boolean_decision(due, all=False):
            super().on_train_epoch_end(trainer, pl_module)
            self._due = started + (time.monotonic() - started) / self.share

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last round unless it is saved already: a signal or the clock ended the run."""
        if not self._averages:
            super().on_train_epoch_end(trainer, pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Save the rounds since the last checkpoint; in the middle of a round nothing is saved."""
        if self._training and not self._averages:
            super().on_train_epoch_end(trainer, pl_module)


def _ends(trainer: Trainer, pl_module: LightningModule) -> bool:
    """Return whether the run ends with this round, as far as that is known as the round ends."""
    epochs, steps = trainer.max_epochs, trainer.max_steps
    federation = getattr(pl_module, "federation", None)
    return (
        trainer.should_stop
        or (epochs is not None and 0 <= epochs <= trainer.current_epoch + 1)
        or 0 <= steps <= trainer.global_step
        or (federation is not None and federation.budget_is_spent())
    )


def keep_in_folder(checkpoint: ModelCheckpoint) -> None:
    """Replace the slashes of metrics' names in the names of files: each would begin a folder.

    A file with the name ``{val/global/loss:.2f}`` becomes ``val_global_loss=0.50.ckpt``. A file
    stays as it is if ``auto_insert_metric_name`` is false, which inserts values alone.

    Args:
        checkpoint: A checkpoint callback.
    """
    filename = checkpoint.filename
    if filename is None or not checkpoint.auto_insert_metric_name:
        return
    groups = set(re.findall(r"\{([^:}]*)[:}]", filename))
    if not any("/" in name for name in groups):
        return
    checkpoint.auto_insert_metric_name = False
    checkpoint.filename = re.sub(
        r"\{([^:}]*)([:}])",
        lambda found: f"{found[1].replace('/', '_')}={{{found[1]}{found[2]}",
        filename,
    )
