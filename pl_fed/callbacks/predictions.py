"""``predictions.csv``: the predictions of ``predict``."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from torch import Tensor

from pl_fed.data import FederatedData
from pl_fed.tasks.own_batches import PerSample
from pl_fed.text import csv_cell
from pl_fed.trees import Tree, count_samples, select, tree_map


class Predictions(Callback):
    """Predictions file: the personalized predictions of clients, one row per test sample.

    If the data has names of owners and classes, further columns hold the names.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "predictions.csv"
        self._owners: Sequence[Sequence[str]] = ()
        self._classes: Sequence[str] = ()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the header of the file."""
        header = ["client", "sample", "target", "prediction", "probability"]
        if isinstance(trainer.datamodule, FederatedData):  # type: ignore[attr-defined]
            module: FederatedData = trainer.datamodule  # type: ignore[attr-defined]
            data, held_out = module.clients, module.held_out
            self._owners, self._classes = data.owners, data.class_names
            if held_out is not None:
                self._owners = [*self._owners, *held_out.owners]
        header += ["owner"] if self._owners else []
        header += ["target_name", "prediction_name"] if self._classes else []
        if trainer.is_global_zero:
            self.path.write_text(",".join(header) + "\n", encoding="utf-8")

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add the rows of a batch of clients."""
        if not trainer.is_global_zero:
            return
        with self.path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            for table in outputs:
                writer.writerows(self._rows(table))

    def _rows(self, table: dict[str, Any]) -> Iterator[list[Any]]:
        """Yield a row for each sample of a client."""
        owner = [csv_cell(", ".join(self._owners[table["client"]]))] if self._owners else []
        for row in _rows(table):
            names = [self._name(cell) for cell in row[2:4]] if self._classes else []
            yield [*row, *owner, *names]

    def _name(self, cell: Any) -> str:
        """Return the name of a class; nothing for another value."""
        is_class = isinstance(cell, int) and 0 <= cell < len(self._classes)
        return csv_cell(self._classes[cell]) if is_class else ""

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the path of the file."""
        if trainer.is_global_zero:
            Console().print(f"The predictions are in {self.path}", soft_wrap=True, markup=False)


def _rows(table: dict[str, Any]) -> Iterator[list[Any]]:
    columns = [table["sample"].tolist(), _cells(table["target"]), _cells(table["prediction"])]
    probabilities = table.get("probability")
    columns.append([""] * len(columns[0]) if probabilities is None else probabilities.tolist())
    for row in zip(*columns):
        yield [table["client"], *row]


def _cells(tree: Tree) -> list[Any]:
    """Return an entry for each sample; if it has several tensors, a dict or list of entries."""
    if isinstance(tree, Tensor):
        return tree.tolist()
    if isinstance(tree, PerSample):
        return [tree_map(Tensor.tolist, entry) for entry in tree]
    return [tree_map(Tensor.tolist, select(tree, place)) for place in range(count_samples(tree))]
