"""Who gets what: ``per_client.csv`` and others, and the same in Weights & Biases."""

import csv
import math
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from pl_fed.callbacks.participation import untrained_models
from pl_fed.callbacks.round_metrics import round_of
from pl_fed.clients.base import Client
from pl_fed.federation import Federation
from pl_fed.loggers import wandb_loggers
from pl_fed.text import csv_cell


class PerClient(Callback):
    """Writes and logs one row per client after every evaluation.

    After a test of classes, there is one row per client and class that it has test samples of, too.
    The rows of the last validation, of a file of their own, are what to choose among runs by, for
    each client.

    Args:
        federation: The federation.
        folder: The run's folder; ``None`` writes no file.
    """

    def __init__(self, federation: Federation, folder: Path | None = None) -> None:
        self.federation = federation
        self.folder = folder
        self._warned = False

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Client) -> None:  # type: ignore[override]
        """Write the clients' validation results, and log them."""
        seen = self._folder_of(trainer) is not None or wandb_loggers(trainer)
        if seen and not trainer.sanity_checking:
            self._show(trainer, "val", {"per_client": self.columns("val")}, "_validation")
        if trainer.state.fn == "validate":
            self._warn_of_untrained_models()

    def on_test_epoch_end(self, trainer: Trainer, pl_module: Client) -> None:  # type: ignore[override]
        """Write the clients' test results, and log them."""
        tables = {"per_client": self.columns("test"), "per_class": self.class_columns("test")}
        self._show(trainer, "test", tables)
        self._warn_of_untrained_models()

    def _warn_of_untrained_models(self) -> None:
        """Warn once of the personal models that were never trained but count in the metrics."""
        if not self._warned and (sentence := untrained_models(self.federation)):
            self._warned = True
            rank_zero_warn(
                f"{sentence} They count in the metrics all the same: the column `rounds` of"
                " per_client.csv says in how many rounds each client took part."
            )

    def _show(
        self, trainer: Trainer, part: str, tables: dict[str, dict[str, list[Any]]], suffix: str = ""
    ) -> None:
        """Log tables, and write them to files, whose names end in a suffix."""
        measures = dict.fromkeys(("accuracy", self.federation.monitored))
        shown = {
            f"{model}_{measure}": f"{part}/{model}/client_{measure}"
            for model in self.federation.metrics(part)
            for measure in measures
        }
        _to_wandb(trainer, part, tables, shown)
        folder = self._folder_of(trainer)
        if folder is not None and trainer.is_global_zero:
            for name, columns in tables.items():
                _write(folder / f"{name}{suffix}.csv", columns)

    def _folder_of(self, trainer: Trainer) -> Path | None:
        """Return where to write, if anywhere: Lightning's ``fast_dev_run`` leaves no file."""
        return None if getattr(trainer, "fast_dev_run", False) else self.folder

    def columns(self, part: str) -> dict[str, list[Any]]:
        """Return the table of a part of the data: one entry per client in each column."""
        data, rounds = self.federation.data, self.federation.participation
        columns: dict[str, list[Any]] = {
            "client": list(range(data.num_clients)),
            **({"owner": [", ".join(each) for each in data.owners]} if data.owners else {}),
            "byzantine": self.federation.is_byzantine.int().tolist(),
            **({} if rounds is None else {"rounds": rounds.tolist()}),
            "train_samples": data.train.sizes.tolist(),
            f"{part}_samples": data.part(part).sizes.tolist(),
        }
        for model, metrics in self.federation.metrics(part).items():
            for name, values in metrics.per_client().items():
                if name != "samples":
                    columns[f"{model}_{name}"] = values.tolist()
        return columns

    def class_columns(self, part: str) -> dict[str, list[Any]]:
        """Return the table of clients and the classes that they have evaluated samples of.

        Returns:
            A column for each of ``client``, ``byzantine``, ``class`` and ``samples``, and the
            accuracy of each model; none where targets are real values.
        """
        columns: dict[str, list[Any]] = {}
        for model, metrics in self.federation.metrics(part).items():
            accuracy, samples = metrics.per_class()
            clients, classes = samples.nonzero(as_tuple=True)
            if not columns and samples.shape[1]:
                byzantine = self.federation.is_byzantine.to(clients.device)[clients]
                columns = {
                    "client": clients.tolist(),
                    "byzantine": byzantine.int().tolist(),
                    "class": classes.tolist(),
                    "samples": samples[clients, classes].tolist(),
                }
            if columns:
                columns[f"{model}_accuracy"] = accuracy[clients, classes].tolist()
        return columns


def _to_wandb(
    trainer: Trainer,
    part: str,
    tables: dict[str, dict[str, list[Any]]],
    shown: dict[str, str],
) -> None:
    """Log tables, and histograms of the benign clients' results.

    Args:
        trainer: The trainer.
        part: The part of the data.
        tables: Columns by name, of each table.
        shown: The columns of clients that have a histogram, and the name of that.
    """
    clients = tables["per_client"]
    for logger in wandb_loggers(trainer):
        import wandb

        benign = {
            shown[name]: [
                value
                for value, lies in zip(values, clients["byzantine"])
                if not lies and math.isfinite(value)
            ]
            for name, values in clients.items()
            if name in shown
        }
        accuracy = {name: wandb.Histogram(values) for name, values in benign.items() if values}
        logged = {
            f"{part}/{name}": wandb.Table(
                columns=list(columns), data=[list(row) for row in zip(*columns.values())]
            )
            for name, columns in tables.items()
            if columns
        }
        logger.experiment.log({**logged, **accuracy, "round": round_of(trainer)})


def _write(path: Path, columns: dict[str, list[Any]]) -> None:
    """Write a table, whole or not at all; where there is none, leave none of an earlier test."""
    if not columns:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_suffix(".csv.tmp")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*map(_written, columns.values())))
    os.replace(temporary, path)


def _written(values: list[Any]) -> list[Any]:
    return [_cell(value) for value in values]


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.9g}"
    return csv_cell(value) if isinstance(value, str) else value
