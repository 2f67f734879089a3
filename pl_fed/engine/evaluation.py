"""Models on the clients' own data: sums for metrics, and predictions."""

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.data.client_data import ClientData
from pl_fed.metrics import ClientMetrics
from pl_fed.state import ClientStore

_BATCH = 1024  # samples that a model sees at once


class WorkSpace:
    """The client's two models as work space: put back as they were, whatever happens.

    Args:
        client: The algorithm.

    Attributes:
        rows: Copies of the models' rows as they were, by name.
        statistics: The same of their running statistics.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.rows: dict[str, Tensor] = {}
        self.statistics: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        for name in ("global", "personal"):
            self.rows[name] = self.client.row(name).data.clone()
            self.statistics[name] = self.client.statistics(name).data.clone()
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("global", "personal"):
            self.client.row(name).data.copy_(self.rows[name])
            self.client.statistics(name).data.copy_(self.statistics[name])

    def load(self, model: str, client: int, store: ClientStore) -> None:
        """Load a client's own model."""
        one = torch.tensor([client])
        self.client.row(model).data.copy_(store.read(model, one)[0])
        statistics = self.client.statistics(model).data
        if statistics.numel():
            statistics.copy_(store.read(f"{model}_statistics", one)[0])


def evaluate(
    space: WorkSpace,
    data: ClientData,
    part: str,
    clients: Tensor,
    model: str,
    store: ClientStore,
    metrics: ClientMetrics,
) -> None:
    """Add some clients to a model's metrics.

    Args:
        space: The client's models.
        data: The data of the federation.
        part: ``train``, ``val`` or ``test``.
        clients: Ids, int64 [clients].
        model: ``"global"``, which is the same for all, or ``"personal"``.
        store: Where the clients' own models are.
        metrics: What to add to.
    """
    classes = max(1, data.num_classes)
    device = data.x.device
    clients = clients.to(device)
    correct = torch.zeros(len(clients) * classes, dtype=torch.int64, device=device)
    count = torch.zeros_like(correct)
    loss = torch.zeros(len(clients), dtype=torch.float64, device=device)
    for position, index, outputs in _outputs(space, data, part, clients, model, store):
        y = data.y[index]
        loss.index_add_(0, position, space.client.sample_losses(outputs, y).double())
        if data.num_classes:
            cell = position * classes + y
            hit = outputs.argmax(1) == y
            correct += torch.bincount(cell[hit], minlength=len(correct))
        else:
            cell = position
        count += torch.bincount(cell, minlength=len(count))
    shape = (len(clients), classes)
    metrics.update(clients, correct.view(shape), count.view(shape), loss)


def predict(
    space: WorkSpace,
    data: ClientData,
    clients: Tensor,
    model: str,
    store: ClientStore,
) -> list[dict[str, Any]]:
    """Return each client's predictions on its own test samples.

    Returns:
        For each client a dict with ``client`` (id), ``sample`` (ids in the data set), ``target``,
        and for classes ``prediction`` and ``probability`` (the predicted class's), else
        ``prediction`` as the net gives it.
    """
    tables: list[dict[str, Any]] = []
    for one in clients.tolist():
        pieces = list(_outputs(space, data, "test", torch.tensor([one]), model, store))
        index = torch.cat([index for _, index, _ in pieces]) if pieces else data.test.samples(one)
        table: dict[str, Any] = {
            "client": one,
            "sample": index.cpu(),
            "target": data.y[index].cpu(),
        }
        outputs = torch.cat([outputs for *_, outputs in pieces]).cpu() if pieces else None
        if outputs is None:
            table["prediction"] = table["target"][:0]
            table["probability"] = torch.empty(0)
        elif data.num_classes:
            probability, table["prediction"] = outputs.softmax(1).max(1)
            table["probability"] = probability
        else:
            table["prediction"] = outputs
        tables.append(table)
    return tables


def _outputs(
    space: WorkSpace,
    data: ClientData,
    part: str,
    clients: Tensor,
    model: str,
    store: ClientStore,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (which of the clients, sample, outputs) in batches."""
    ids = clients.tolist()
    samples = [data.part(part).samples(one) for one in ids]
    sizes = torch.tensor([len(index) for index in samples], device=data.x.device)
    module = space.client.model(model)
    if model == "global":
        positions = torch.repeat_interleave(sizes)
        groups = [(positions, torch.cat(samples) if samples else positions)]
    else:
        groups = [
            (torch.full_like(index, position), index) for position, index in enumerate(samples)
        ]
    for position, (positions, index) in enumerate(groups):
        if len(index) == 0:
            continue
        if model != "global":
            space.load(model, ids[position], store)
        for each, chosen in zip(positions.split(_BATCH), index.split(_BATCH)):
            yield each, chosen, module(data.x.index_select(0, chosen))
