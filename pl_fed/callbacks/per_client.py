"""Results of each client: ``per_client.csv`` and other tables, also in Weights & Biases."""

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import Tensor

from pl_fed.callbacks.round_metrics import find_evaluated_round
from pl_fed.clients.base import Client
from pl_fed.federation import Federation
from pl_fed.files import replace_file
from pl_fed.loggers import wandb_loggers
from pl_fed.metrics import ClientMetrics
from pl_fed.rounds.federated_evaluation import FederatedEvaluation
from pl_fed.text import csv_cell


class PerClient(Callback):
    """Client tables: one row per client after every evaluation, in a file and in W&B.

    A test of a classification task also has one row per client and class with test samples, and one
    per client and group if the data has groups. The
    last validation has a file of its own, from which a run can be chosen for each client.

    Args:
        federation: The federation.
        folder: The run's folder; ``None`` writes no file.
    """

    def __init__(self, federation: Federation, folder: Path | None = None) -> None:
        self.federation = federation
        self.folder = folder

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Client) -> None:  # type: ignore[override]
        """Write the clients' validation results, and log them."""
        has_reader = self._output_folder(trainer) is not None or wandb_loggers(trainer)
        if has_reader and not trainer.sanity_checking:
            self._write(trainer, "val", {"per_client": self.columns("val")}, "_validation")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: Client) -> None:  # type: ignore[override]
        """Write the clients' test results, and log them."""
        tables = {
            "per_client": self.columns("test"),
            "per_class": self.class_columns("test"),
            "per_group": self.group_columns("test"),
        }
        self._write(trainer, "test", tables)

    def _write(
        self, trainer: Trainer, part: str, tables: dict[str, dict[str, list[Any]]], suffix: str = ""
    ) -> None:
        """Log tables and write them to files.

        Args:
            trainer: The trainer.
            part: The part of the data.
            tables: The columns of each table, by the names of the table and the column.
            suffix: The end of the file names.
        """
        metrics = dict.fromkeys(("accuracy", self.federation.monitored_metric))
        histograms = {
            f"{model}_{metric}": f"{part}/{model}/client_{metric}"
            for model in self.federation.metrics(part)
            for metric in metrics
        }
        _log_to_wandb(trainer, part, tables, histograms)
        folder = self._output_folder(trainer)
        if folder is not None and trainer.is_global_zero:
            for name, columns in tables.items():
                _write_csv(folder / f"{name}{suffix}.csv", columns)

    def _output_folder(self, trainer: Trainer) -> Path | None:
        """Return the folder for files, or ``None``: ``fast_dev_run`` writes no files."""
        return None if getattr(trainer, "fast_dev_run", False) else self.folder

    def columns(self, part: str) -> dict[str, list[Any]]:
        """Return the columns of the table of a part of the data.

        Each has one entry per client, or per drawn client if a validation evaluates a sample.
        Held-out clients follow the training clients, and have 1 in the column ``held_out``; it is
        missing if all clients train.
        """
        held_out = self.federation.session.held_out
        evaluation, metrics = self.federation.session.evaluation, self.federation.metrics(part)
        columns = self._columns(part, evaluation, metrics, self.federation.participation)
        if held_out is None:
            return columns
        metrics = self.federation.held_out_metrics(part)
        added = self._columns(part, held_out.evaluation, metrics, held_out.states.participation)
        added["client"] = [client + self.federation.data.num_clients for client in added["client"]]
        number, more = len(columns["client"]), len(added["client"])
        columns = {
            name: values + added.get(name, [math.nan] * more) for name, values in columns.items()
        }
        return columns | {"held_out": [0] * number + [1] * more}

    @staticmethod
    def _columns(
        part: str,
        evaluation: FederatedEvaluation,
        metrics: Mapping[str, ClientMetrics],
        rounds: Tensor | None,
    ) -> dict[str, list[Any]]:
        """Return the columns of some clients.

        Args:
            part: The part of the data.
            evaluation: The evaluation of the clients.
            metrics: Its metrics, by model.
            rounds: The number of rounds of each client, int32 [clients]; ``None`` if unknown.
        """
        data, clients = evaluation.states.data, evaluation.list_evaluated_clients(part)
        owners = [", ".join(data.owners[client]) for client in clients.tolist() if data.owners]
        columns: dict[str, list[Any]] = {
            "client": clients.tolist(),
            **({"owner": owners} if data.owners else {}),
            "byzantine": evaluation.byzantine_clients.is_byzantine[clients].int().tolist(),
            **({} if rounds is None else {"rounds": rounds[clients].tolist()}),
            "train_samples": data.train.sizes[clients].tolist(),
            f"{part}_samples": data.part(part).sizes[clients].tolist(),
        }
        for model, client_metrics in metrics.items():
            for name, values in client_metrics.per_client().items():
                if name not in ("samples", "byzantine"):
                    columns[f"{model}_{name}"] = values[clients.to(values.device)].tolist()
        return columns

    def class_columns(self, part: str) -> dict[str, list[Any]]:
        """Return the columns of the table with one row per client and class with samples.

        Held-out clients are not in it.

        Returns:
            The columns ``client``, ``byzantine``, ``class`` and ``samples``, and the accuracy of
            each model; ``owner`` and ``class_name`` if the data has names. Empty for real-valued
            targets.
        """
        data = self.federation.data
        columns: dict[str, list[Any]] = {}
        for model, metrics in self.federation.metrics(part).items():
            accuracy, samples = metrics.per_class()
            clients, classes = samples.nonzero(as_tuple=True)
            if not columns and samples.shape[1]:
                byzantine = self.federation.is_byzantine[clients.cpu()]
                owners = [", ".join(data.owners[c]) for c in clients.tolist() if data.owners]
                columns = {
                    "client": clients.tolist(),
                    **({"owner": owners} if data.owners else {}),
                    "byzantine": byzantine.int().tolist(),
                    "class": classes.tolist(),
                    "samples": samples[clients, classes].tolist(),
                }
                if data.class_names:
                    columns["class_name"] = [data.class_names[c] for c in classes.tolist()]
            if columns:
                columns[f"{model}_accuracy"] = accuracy[clients, classes].tolist()
        return columns

    def group_columns(self, part: str) -> dict[str, list[Any]]:
        """Return the columns of the table with one row per client and group with samples.

        Held-out clients are not in it.

        Returns:
            The columns ``client``, ``byzantine``, ``group`` (the name) and ``samples``, and the
            accuracy of each model. Empty without groups.
        """
        data = self.federation.data
        columns: dict[str, list[Any]] = {}
        for model, metrics in self.federation.metrics(part).items():
            accuracy, samples = metrics.per_group()
            clients, groups = samples.nonzero(as_tuple=True)
            if not columns and samples.shape[1]:
                columns = {
                    "client": clients.tolist(),
                    "byzantine": self.federation.is_byzantine[clients.cpu()].int().tolist(),
                    "group": [data.group_names[group] for group in groups.tolist()],
                    "samples": samples[clients, groups].tolist(),
                }
            if columns:
                columns[f"{model}_accuracy"] = accuracy[clients, groups].tolist()
        return columns


def _log_to_wandb(
    trainer: Trainer,
    part: str,
    tables: dict[str, dict[str, list[Any]]],
    histograms: dict[str, str],
) -> None:
    """Log tables, and histograms of the benign training clients' results.

    Args:
        trainer: The trainer.
        part: The part of the data.
        tables: The columns of each table, by the names of the table and the column.
        histograms: The names of histograms by the columns that they show.
    """
    clients = tables["per_client"]
    held_out = clients.get("held_out", [0] * len(clients["byzantine"]))
    is_benign = [not (attacks or new) for attacks, new in zip(clients["byzantine"], held_out)]
    for logger in wandb_loggers(trainer):
        import wandb

        benign_values = {
            histograms[name]: [
                value for value, benign in zip(values, is_benign) if benign and math.isfinite(value)
            ]
            for name, values in clients.items()
            if name in histograms
        }
        wandb_histograms = {
            name: wandb.Histogram(values) for name, values in benign_values.items() if values
        }
        wandb_tables = {
            f"{part}/{name}": wandb.Table(
                columns=list(columns), data=[list(row) for row in zip(*columns.values())]
            )
            for name, columns in tables.items()
            if columns
        }
        logger.experiment.log(
            {**wandb_tables, **wandb_histograms, "round": find_evaluated_round(trainer)}
        )


def _write_csv(path: Path, columns: dict[str, list[Any]]) -> None:
    """Write a table atomically; without columns, delete the file of an earlier test."""
    if not columns:
        path.unlink(missing_ok=True)
        return
    with replace_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*map(_format_column, columns.values())))


def _format_column(values: list[Any]) -> Iterable[Any]:
    """Return the cells of a column; its values have one type."""
    if values and isinstance(values[0], float):
        return map("{:.9g}".format, values)
    return map(csv_cell, values) if values and isinstance(values[0], str) else values
