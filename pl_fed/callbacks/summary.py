"""The short table that a run ends with."""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table

from pl_fed.callbacks.participation import untrained_models
from pl_fed.federation import Federation
from pl_fed.reports.tables import result_titles


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
        what = "accuracy" if any("accuracy" in found for found in values.values()) else "results"
        stage = "validation" if part == "val" else part
        table = Table("")
        for model in values:
            table.add_column(f"{model} model", justify="right")
        names = {name for found in values.values() for name in found}
        for name, meaning in result_titles(names, self.federation.monitored).items():
            if any(name in found for found in values.values()):
                row = [f"{v[name]:.4f}" if name in v else "-" for v in values.values()]
                table.add_row(meaning, *row)
        console = Console()
        if table.row_count:
            console.print(f"{stage} {what} of benign clients", style="italic")
            console.print(table)
            if sentence := untrained_models(self.federation):
                console.print(sentence, soft_wrap=True, markup=False)
        else:
            console.print(f"no benign client has {stage} data", style="italic")
        if self.folder is not None and not getattr(trainer, "fast_dev_run", False):
            console.print(f"The run's files are in {self.folder}", soft_wrap=True, markup=False)
