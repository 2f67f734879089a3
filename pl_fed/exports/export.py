"""Export of clients' models, as they are evaluated, into a folder with a manifest."""

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.evaluation.monitor import Tables, prefer_second
from pl_fed.exports.formats import FORMATS
from pl_fed.exports.request import Request
from pl_fed.federation import Federation
from pl_fed.run_folder import create_atomically, new_folder
from pl_fed.trees import Tree, describe, tree_map

MANIFEST = "manifest.json"


class Export:
    """Export: writes models of a federation with a loaded checkpoint.

    Args:
        federation: The federation.
        request: The models and formats to write.
        clients: The ids of the clients to write, int64 [n].
        client: The algorithm. The last of its evaluated models is its personal model, or the global
            one without personal models.

    Raises:
        ValueError: If the algorithm lacks the requested models, or predicts by more than a net.
    """

    def __init__(
        self, federation: Federation, request: Request, clients: Tensor, client: Client
    ) -> None:
        evaluated = client.evaluated
        self.federation = federation
        self.request = request
        self.clients = clients
        self.client_model = evaluated[-1]
        lacks = {"personal": self.client_model == "global", "global": "global" not in evaluated}
        for model, other in (("personal", "global"), ("global", "personal")):
            if len(clients) and lacks[model] and request.select != other:
                raise ValueError(
                    f"Expected argument `select` to be {other} for an algorithm without {model}"
                    f" models but got {request.select}: add `--select {other}`."
                )
        if len(clients) and request.select != "global" and not client.predicts_by_net:
            raise ValueError(
                f"Expected argument `select` to be global for {type(client).__name__}, which"
                f" predicts by more than a net, but got {request.select}: add `--select global`."
            )
        if request.with_global and lacks["global"]:
            raise ValueError(
                "Expected argument `global` to be absent for an algorithm without a global model"
                " but got it: remove `--global`."
            )

    def write(self) -> Path:
        """Write all files or none.

        Returns:
            The folder.

        Raises:
            OSError: If a file cannot be written, for example on a full disk.
            ValueError: If the net cannot be written in a format.
        """
        session = self.federation.session
        data, row = session.datamodule.clients, session.client.row("global").data
        names = [name for name in self.request.formats if not FORMATS[name].takes_trees]
        has_own_batches = data.own_batches is not None
        if names and (has_own_batches or not isinstance(data.inputs, Tensor)):
            got = "batches of any type" if has_own_batches else describe(data.inputs)
            raise ValueError(
                f"Expected inputs to be one tensor for export as {', '.join(names)} but got"
                f" {got}: use `--format state_dict`, or load the run's checkpoint"
                " by pl_fed instead."
            )
        casts_integers = not self.federation.client.takes_integers
        example = tree_map(
            lambda x: x.to(row.dtype) if x.is_floating_point() or casts_integers else x,
            data.batch(torch.tensor([0, data.num_samples - 1])).inputs,
        )
        formats = [FORMATS[word](example) for word in self.request.formats]
        out = self.request.out or new_folder(self.request.run / "exports", "out")
        number = len(self.clients) + self.request.with_global
        with create_atomically(out) as folder:
            entries = []
            for entry, net in track(self._models(), "Exporting", number, transient=True):
                files = [f"{entry['name']}{format.suffix}" for format in formats]
                for format, file in zip(formats, files):
                    with _raise_system_errors():
                        format.write(net.cpu(), folder / file)
                entries.append({**entry, "files": files})
            manifest = {**self._describe_run(example), "models": entries}
            text = json.dumps(manifest, indent=1, allow_nan=False) + "\n"
            (folder / MANIFEST).write_text(text, encoding="utf-8")
        return out

    def _models(self) -> Iterator[tuple[dict[str, Any], nn.Module]]:
        """Yield the manifest's entry for each model, and the model."""
        federation, clients = self.federation, self.clients
        if self.request.with_global:
            names = {"name": "global", "client": None, "model": "global"}
            yield names, federation.model_of(0, "global")
        if not len(clients):
            return
        owners = federation.session.datamodule.evaluated_owners
        choices, tables = self._choose_models()
        nets = {
            model: federation.models_of(clients[[choice == model for choice in choices]], model)
            for model in set(choices)
        }
        for position, (client, model) in enumerate(zip(clients.tolist(), choices)):
            entry: dict[str, Any] = {"name": f"client_{client}", "client": client, "model": model}
            entry |= {"owners": list(owners[client])} if owners else {}
            entry |= self._validation_results(tables[model], position)
            yield entry, next(nets[model])

    def _choose_models(self) -> tuple[list[str], dict[str, Tables]]:
        """Choose the model of each client.

        Returns:
            The name of each client's model, and the validation results by model.
        """
        federation, select = self.federation, self.request.select
        both = ["global", self.client_model]
        models = {"personal": both[1:], "global": both[:1]}.get(select, both)
        evaluator = federation.session.evaluation.evaluator
        with federation.session.states.settings.autocast():
            tables = federation.measure("val", self.clients, models)
        if select != "validation":
            return models * len(self.clients), tables
        monitor = evaluator.monitor(federation.data)
        prefers_own = prefer_second(tables["global"], tables[self.client_model], monitor)
        return [both[choice] for choice in prefers_own.int().tolist()], tables

    def _validation_results(self, tables: Tables, position: int) -> dict[str, Any]:
        """Return a model's results on a client's validation data; ``None`` for unknown values.

        Args:
            tables: The model's validation tables.
            position: The row of the client in the tables.
        """
        correct, samples, loss = (float(table[position].sum()) for table in tables[:3])
        client = self.federation.client
        classes = client.count_classes(self.federation.data)
        accuracy = correct / samples if samples and classes else None
        mean_loss = loss / samples if samples and math.isfinite(loss) else None
        metrics = {
            f"val_{name}": value if math.isfinite(value) else None
            for name, value in zip(
                client.task.metric_directions(), tables.measures[position].tolist()
            )
        }
        results = {"val_samples": int(samples), "val_accuracy": accuracy, "val_loss": mean_loss}
        return results | metrics

    def _describe_run(self, example: Tree) -> dict[str, Any]:
        """Return the part of the manifest that is common to all models."""
        federation = self.federation
        client, data = federation.client, federation.session.datamodule
        net = client.global_model
        inputs = {} if data.clients.own_batches else tree_map(_describe_leaf, example)
        if isinstance(inputs, tuple | list):
            inputs = {str(place): leaf for place, leaf in enumerate(inputs)}
        return {
            "checkpoint": str(self.request.checkpoint),
            "algorithm": type(client).__name__,
            "net": f"{type(net).__module__}.{type(net).__qualname__}",
            "classes": data.clients.num_classes,
            "class_names": list(data.clients.class_names),
            "torch": torch.__version__,
            "select": self.request.select,
            "precision": federation.client.trainer.precision,
            "inputs": inputs | data.preparation,
        }


@contextmanager
def _raise_system_errors() -> Iterator[None]:
    """Raise errors of the system, which safetensors gives as a text, as ``OSError``."""
    try:
        yield
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def _describe_leaf(leaf: Tensor) -> dict[str, Any]:
    """Return the shape and the dtype of one sample."""
    return {"shape": list(leaf.shape[1:]), "dtype": str(leaf.dtype).split(".")[1]}
