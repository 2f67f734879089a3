"""A line in the terminal until a run starts: data may take a while to read."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console


class StartStatus(Callback):
    """Start status: shows a line in a terminal until the first evaluation or fit starts.

    Args:
        text: The text of the line.
    """

    def __init__(self, text: str) -> None:
        console = Console(stderr=True)
        self._status = console.status(text, refresh_per_second=4)
        if console.is_terminal:
            self._status.start()

    def stop(self) -> None:
        """Remove the line."""
        self._status.stop()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the line."""
        self.stop()

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: Any) -> None:
        """Remove the line."""
        self.stop()
