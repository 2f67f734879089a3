"""Clients' models, as they are evaluated, become files in a folder, with a manifest."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from pl_fed.evaluation.monitor import Tables, metric_directions, prefer_second
from pl_fed.exports.formats import FORMATS
from pl_fed.exports.request import Request
from pl_fed.federation import Federation
from pl_fed.run_folder import made_whole, new_folder
from pl_fed.trees import describe

MANIFEST = "manifest.json"


class Export:
    """Writes models of a federation whose checkpoint is loaded.

    Args:
        federation: The federation.
        request: What is wanted.
        clients: The ids of the clients that are, int64 [n].
        evaluates: The models that the algorithm evaluates, its own one last.

    Raises:
        ValueError: If the algorithm has no such models.
    """

    def __init__(
        self, federation: Federation, request: Request, clients: Tensor, evaluates: tuple[str, ...]
    ) -> None:
        self.federation = federation
        self.request = request
        self.clients = clients
        self.own = evaluates[-1]
        lacks = {"personal": self.own == "global", "global": "global" not in evaluates}
        for model, other in (("personal", "global"), ("global", "personal")):
            if len(clients) and lacks[model] and request.select != other:
                raise ValueError(
                    f"Expected argument `select` to be {other} for an algorithm that has no"
                    f" {model} models but got {request.select}."
                )
        if request.with_global and lacks["global"]:
            raise ValueError(
                "Expected argument `global` to be left out for an algorithm without a global model"
                " but got it."
            )

    def write(self) -> Path:
        """Write everything, or nothing; return the folder.

        Raises:
            ValueError: If the net cannot be written in a format.
        """
        data, row = self.federation.datamodule.clients, self.federation.client.row("global").data
        if not isinstance(data.inputs, Tensor):
            raise ValueError(
                f"Expected inputs of one tensor to write a net in {', '.join(self.request.formats)}"
                f" but got {describe(data.inputs)}: load the run's checkpoint by pl_fed instead."
            )
        example = data.batch(torch.tensor([0, data.num_samples - 1])).inputs
        if example.is_floating_point() or not self.federation.client.takes_integers:
            example = example.to(row.dtype)
        formats = [FORMATS[word](example) for word in self.request.formats]
        out = self.request.out or new_folder(self.request.run / "exports", "out")
        number = len(self.clients) + self.request.with_global
        with made_whole(out) as folder:
            entries = []
            for entry, net in track(self._models(), "Exporting", number, transient=True):
                files = [f"{entry['name']}{each.suffix}" for each in formats]
                for each, file in zip(formats, files):
                    each.write(net.cpu(), folder / file)
                entries.append({**entry, "files": files})
            about = {**self._about(example), "models": entries}
            text = json.dumps(about, indent=1, allow_nan=False) + "\n"
            (folder / MANIFEST).write_text(text, encoding="utf-8")
        return out

    def _models(self) -> Iterator[tuple[dict[str, Any], nn.Module]]:
        """Yield what the manifest says of each model, and the model."""
        federation, clients = self.federation, self.clients
        if self.request.with_global:
            entry = {"name": "global", "client": None, "model": "global"}
            yield entry, federation.model_of(0, "global")
        if not len(clients):
            return
        owners = federation.data.owners
        chosen, tables = self._chosen()
        nets = {
            model: federation.models_of(clients[[each == model for each in chosen]], model)
            for model in set(chosen)
        }
        for position, (client, model) in enumerate(zip(clients.tolist(), chosen)):
            entry = {"name": f"client_{client}", "client": client, "model": model}
            whose = {"owners": list(owners[client])} if owners else {}
            yield entry | whose | self._validation(tables[model], position), next(nets[model])

    def _chosen(self) -> tuple[list[str], dict[str, Tables]]:
        """Return which model each client gets, and how good the models in question are."""
        federation, select = self.federation, self.request.select
        models = {"personal": [self.own], "global": ["global"]}.get(select, ["global", self.own])
        with federation.states.settings.autocast():
            tables = federation.evaluator.tables(federation.data, "val", self.clients, models)
        if select != "validation":
            return models * len(self.clients), tables
        own = prefer_second(
            tables["global"], tables[self.own], federation.evaluator.monitor(federation.data)
        )
        return [self.own if each else "global" for each in own.tolist()], tables

    def _validation(self, tables: Tables, position: int) -> dict[str, Any]:
        """Return how good a model is by a client's validation data; ``None`` if that is unknown."""
        right, samples, loss = (float(table[position].sum()) for table in tables[:3])
        client = self.federation.client
        classes = client.classes_of(self.federation.data)
        accuracy = right / samples if samples and classes else None
        mean = loss / samples if samples and math.isfinite(loss) else None
        measures = {
            f"val_{name}": value if math.isfinite(value) else None
            for name, value in zip(
                metric_directions(client.task), tables.measures[position].tolist()
            )
        }
        found = {"val_samples": int(samples), "val_accuracy": accuracy, "val_loss": mean}
        return found | measures

    def _about(self, example: Tensor) -> dict[str, Any]:
        """Return what the manifest says of all models."""
        federation = self.federation
        client, data, net = federation.client, federation.datamodule, federation.client.global_model
        inputs = {"shape": list(example.shape[1:]), "dtype": str(example.dtype).split(".")[1]}
        return {
            "checkpoint": str(self.request.checkpoint),
            "algorithm": type(client).__name__,
            "net": f"{type(net).__module__}.{type(net).__qualname__}",
            "classes": data.clients.num_classes,
            "torch": torch.__version__,
            "select": self.request.select,
            "precision": federation.client.trainer.precision,
            "inputs": inputs | data.preparation,
        }
