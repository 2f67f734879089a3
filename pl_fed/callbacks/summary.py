"""The short table that a run ends with."""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table

from pl_fed.federation import Federation

_ROWS = {
    "accuracy": "mean over clients",
    "accuracy_std": "spread over clients (std)",
    "accuracy_worst10": "worst 10 % of clients",
    "accuracy_best10": "best 10 % of clients",
    "accuracy_weighted": "over all samples",
    "loss": "loss",
    "backdoor_success": "taken for the backdoor's class",
}


class Summary(Callback):
    """Prints global and personal accuracy, their spread, and where the run's files are.

    Args:
        federation: The federation.
        folder: The run's folder.
    """

    def __init__(self, federation: Federation, folder: Path | None = None) -> None:
        self.federation = federation
        self.folder = folder

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table of the test metrics."""
        self._print(trainer, "test")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table of the validation metrics, unless a fit goes on."""
        if trainer.state.fn == "validate":
            self._print(trainer, "val")

    def _print(self, trainer: Trainer, part: str) -> None:
        values = {
            model: metrics.compute() for model, metrics in self.federation.metrics(part).items()
        }
        if not trainer.is_global_zero:
            return
        what = {"test": "test accuracy", "val": "validation accuracy"}[part]
        table = Table(title=f"{what} of benign clients", title_justify="left")
        table.add_column("")
        for model in values:
            table.add_column(f"{model} model", justify="right")
        for name, title in _ROWS.items():
            found = [f"{v[name]:.4f}" if name in v else "–" for v in values.values()]
            if name != "backdoor_success" or any(name in v for v in values.values()):
                table.add_row(title, *found)
        console = Console()
        console.print(table)
        if self.folder is not None and not getattr(trainer, "fast_dev_run", False):
            console.print(f"The run's files are in {self.folder}", soft_wrap=True, markup=False)
