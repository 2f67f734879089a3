"""``predictions.csv``: the predictions of ``predict``."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from torch import Tensor

from pl_fed.trees import Tree, count_samples, select, tree_map


class Predictions(Callback):
    """Predictions file: the personalized predictions of clients, one row per test sample.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "predictions.csv"

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the header of the file."""
        header = ["client", "sample", "target", "prediction", "probability"]
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
                writer.writerows(_rows(table))

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
    return [tree_map(Tensor.tolist, select(tree, place)) for place in range(count_samples(tree))]
