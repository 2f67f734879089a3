"""``predictions.csv``: the predictions of ``predict``."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from torch import Tensor

from pl_fed.data import FederatedData
from pl_fed.tasks.step_predictions import PerSample
from pl_fed.text import csv_cell
from pl_fed.trees import Tree, tree_map

_COLUMNS = ("client", "sample", "target", "prediction", "probability")


class Predictions(Callback):
    """Predictions file: the personalized predictions of clients, one row per test sample.

    If ``predict_step`` returns a dict with ``prediction``, its other entries are columns, too. If
    the data has names of owners and classes, further columns hold the names.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "predictions.csv"
        self._owners: Sequence[Sequence[str]] = ()
        self._classes: Sequence[str] = ()
        self._further_names: list[str] | None = None

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the header of the file."""
        if isinstance(trainer.datamodule, FederatedData):  # type: ignore[attr-defined]
            module: FederatedData = trainer.datamodule  # type: ignore[attr-defined]
            data, held_out = module.clients, module.held_out
            self._owners, self._classes = data.owners, data.class_names
            if held_out is not None:
                self._owners = [*self._owners, *held_out.owners]
        self._further_names = None
        if trainer.is_global_zero:
            self._write_header()

    def _write_header(self, further_names: Sequence[str] = ()) -> None:
        """Begin the file.

        Args:
            further_names: The entries of a ``predict_step`` beside prediction and probability.
        """
        header = [*_COLUMNS, *map(csv_cell, further_names)]
        header += ["owner"] if self._owners else []
        header += ["target_name", "prediction_name"] if self._classes else []
        with self.path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(header)

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
        tables = [table for table in outputs if len(table["sample"])]
        if not trainer.is_global_zero or not tables:
            return
        if self._further_names is None:  # a client without samples has no predictions
            self._further_names = [name for name in tables[0] if name not in _COLUMNS]
            self._write_header(self._further_names)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            for table in tables:
                writer.writerows(self._rows(table))

    def _rows(self, table: dict[str, Any]) -> Iterator[list[Any]]:
        """Yield a row for each sample of a client."""
        owner = [csv_cell(", ".join(self._owners[table["client"]]))] if self._owners else []
        for row in _rows(table, self._further_names or ()):
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


def _rows(table: dict[str, Any], further_names: Sequence[str]) -> Iterator[list[Any]]:
    count = len(table["sample"])
    names = [*_COLUMNS[1:], *further_names]
    for row in zip(*[_cells(table.get(name, ""), count) for name in names]):
        cells = [csv_cell(cell) if isinstance(cell, str) else cell for cell in row]
        yield [table["client"], *cells]


def _cells(tree: Tree, count: int) -> list[Any]:
    """Return an entry for each sample; if it has several tensors, a dict or list of entries."""
    if isinstance(tree, Tensor):
        return tree.tolist()
    if isinstance(tree, PerSample):
        return [tree_map(Tensor.tolist, entry) for entry in tree]
    if isinstance(tree, dict):
        columns = [_cells(branch, count) for branch in tree.values()]
        return [dict(zip(tree, cells)) for cells in zip(*columns)]
    if isinstance(tree, tuple | list):
        rows = zip(*[_cells(branch, count) for branch in tree])
        return [type(tree)(*r) if hasattr(tree, "_fields") else type(tree)(r) for r in rows]
    return [tree] * count
