"""The table of results at the end of a run."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pl_fed.callbacks.participation import describe_untrained
from pl_fed.data.central import CENTRAL
from pl_fed.federation import Federation
from pl_fed.metrics import ClientMetrics
from pl_fed.reports.titles import result_titles


class Summary(Callback):
    """Summary: a printed table of each model's metrics, the time, and the path of the run's folder.

    The clients' own model is in bold, or the global model if there is no other.

    Args:
        federation: The federation.
        folder: The run's folder; ``None`` prints no path.
        next_command: A command that shows more of the results; ``None`` prints none.
    """

    def __init__(
        self,
        federation: Federation,
        folder: Path | None = None,
        next_command: str | None = None,
    ) -> None:
        self.federation = federation
        self.folder = folder
        self.next_command = next_command
        self._started = (0, 0.0)  # round and time
        self._fitted = ""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._started = (trainer.current_epoch, time.monotonic())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        first, start = self._started
        rounds, seconds = trainer.current_epoch - first, time.monotonic() - start
        pace = f" ({seconds / rounds:.2g} s per round)" if rounds else ""
        self._fitted = f"{rounds} rounds in {seconds:.1f} s{pace}"

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table of the test metrics."""
        self._print(trainer, "test")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table of the validation metrics, except during a fit."""
        if trainer.state.fn == "validate":
            self._print(trainer, "val")

    def _print(self, trainer: Trainer, part: str) -> None:
        values = _compute(trainer, part, self.federation.metrics(part))
        held_out = _compute(trainer, f"{part}/held_out", self.federation.held_out_metrics(part))
        if not trainer.is_global_zero:
            return
        stage = "validation" if part == "val" else part
        table, console = _build_table(values, self.federation.monitored_metric), Console()
        if self._fitted:
            console.print(self._fitted, highlight=False)
        if table.row_count:
            console.print(f"{stage} {_subject(values)} of benign clients", style="italic")
            console.print(table)
            sentences: list[str | None] = [describe_untrained(self.federation)]
            sentences += _undefined_metrics(values)
            central = _find_logged(trainer, f"{part}/{CENTRAL}/")
            sentences.append(self._describe_central(central, part))
            for sentence in filter(None, sentences):
                console.print(sentence, soft_wrap=True, markup=False)
        else:
            console.print(self._explain_empty(part), style="italic")
        if any(held_out.values()):
            table = _build_table(held_out, self.federation.monitored_metric)
            console.print(f"{stage} {_subject(held_out)} of held-out clients", style="italic")
            console.print(table)
        if (privacy := self.federation.privacy_statement()) is not None:
            console.print(privacy, soft_wrap=True, markup=False)
        if self.folder is not None and not getattr(trainer, "fast_dev_run", False):
            console.print(f"The run's files are in {self.folder}", soft_wrap=True, markup=False)
            if self._fitted and self.next_command:
                console.print(f"Next: {self.next_command}", soft_wrap=True, markup=False)

    def _explain_empty(self, part: str) -> str:
        """Return the reason of a table without metrics."""
        stage = "validation" if part == "val" else part
        sizes = self.federation.session.datamodule.clients.part(part).sizes
        if not sizes[~self.federation.is_byzantine].any():
            return f"no benign client has {stage} data"
        return f"no metrics: log some in `{stage}_step` of the net, or set `federation.metrics`"

    def _describe_central(self, numbers: Mapping[str, Tensor], part: str) -> str | None:
        """Return the metrics of the global model on the server's samples; ``None`` without any."""
        central = self.federation.session.central
        if central is None or not numbers:
            return None
        size = len(central.central.part(part).index)
        texts = [f"{name} {float(value):.4f}" for name, value in numbers.items()]
        return f"Global model on the server's {size:,} samples: {', '.join(texts)}."


def _compute(
    trainer: Trainer, prefix: str, metrics: Mapping[str, ClientMetrics]
) -> dict[str, dict[str, Tensor]]:
    """Return the values of metrics and of the user's logs, by model and name."""
    return {
        model: {**_find_logged(trainer, f"{prefix}/{model}/"), **client_metrics.compute()}
        for model, client_metrics in metrics.items()
    }


def _subject(values: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Return the word for the metrics of a table."""
    return "accuracy" if any("accuracy" in metrics for metrics in values.values()) else "results"


def _find_logged(trainer: Trainer, prefix: str) -> dict[str, Tensor]:
    """Return the numbers in the log by their names behind a prefix; users may log their own."""
    return {
        name.removeprefix(prefix): value
        for name, value in trainer.callback_metrics.items()
        if name.startswith(prefix) and value.numel() == 1
    }


def _build_table(values: Mapping[str, Mapping[str, Tensor]], monitored: str) -> Table:
    """Return the table of metrics, with a column for each model.

    Args:
        values: The metrics by model and name.
        monitored: The metric to show first.
    """
    table = Table("")
    main = [model for model in values if model not in ("hybrid", "smoothed")][-1:]
    for model in values:
        style = "bold" if model in main else None
        table.add_column(f"{model} model", justify="right", style=style)
    names = {name for metrics in values.values() for name in metrics}
    for name, title in result_titles(names, monitored).items():
        row = [f"{v[name]:.4f}" if name in v else "-" for v in values.values()]
        table.add_row(title, *row)
    return table


def _undefined_metrics(values: Mapping[str, Mapping[str, Tensor]]) -> Iterator[str]:
    """Yield a sentence for each metric that some clients have no value of.

    Args:
        values: The metrics by model and name.
    """
    names = dict.fromkeys(name for metrics in values.values() for name in metrics)
    for name in names:
        if not name.endswith("_undefined"):
            continue
        counts = {model: int(metrics[name]) for model, metrics in values.items() if name in metrics}
        if any(counts.values()):
            text = ", ".join(f"{count} ({model} model)" for model, count in counts.items())
            metric = name.removesuffix("_undefined")
            yield f"Clients without a value of {metric}, which its statistics leave out: {text}."
