"""``checkpoints/last.ckpt``: as often as it costs little, and at the end."""

import time
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging

from pl_fed.arguments import check_at_most, check_positive


class LastCheckpoint(ModelCheckpoint):
    """Keeps the latest round that was saved: what a run saves unless it is given a ModelCheckpoint.

    Its folder is there from the start: an empty one is that of a run that was stopped before.

    A checkpoint holds the states of all clients, and may take longer than a round. So rounds go on
    unsaved until saving has taken no more than a share of the time. The last round is saved in any
    case, and, on an error or a signal between two rounds, the one before. Beside Lightning's
    ``WeightAveraging`` each round is saved as it ends, and none later: that callback puts the
    average in the place of the model for validations, and when training ends.

    Args:
        share: Largest share of the time that saving takes, in (0, 1]; 1 saves each round.

    Raises:
        ValueError: If it is out of range.
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
        """Note that nothing is trained yet, or loaded."""
        with warnings.catch_warnings():  # a resumed run goes on in its folder
            warnings.filterwarnings("ignore", ".*exists and is not empty")
            super().setup(trainer, pl_module, stage)
        writes = trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False)
        if stage == "fit" and writes and self.dirpath is not None:
            Path(self.dirpath).mkdir(parents=True, exist_ok=True)
        self._training = False
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._averages = any(isinstance(each, WeightAveraging) for each in callbacks)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what a checkpoint says; an evaluation of it has a folder of its own."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The dirpath has changed")
            super().load_state_dict(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the first round."""
        super().on_train_start(trainer, pl_module)
        self._due, self._training = 0.0, True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the round if it is time."""
        started = time.monotonic()
        due = self._averages or started >= self._due
        if trainer.strategy.reduce_boolean_decision(due, all=False):
            super().on_train_epoch_end(trainer, pl_module)
            self._due = started + (time.monotonic() - started) / self.share

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last round, if it is not."""
        if not self._averages:
            super().on_train_epoch_end(trainer, pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Save what was trained since; the trainer does not in the middle of a round."""
        if self._training and not self._averages:
            super().on_train_epoch_end(trainer, pl_module)
