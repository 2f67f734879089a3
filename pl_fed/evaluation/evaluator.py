"""Models on the clients' own data: sums for metrics, and predictions."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, ModelRows
from pl_fed.clients.model_guard import ModelGuard
from pl_fed.data.client_data import ClientData
from pl_fed.engine.channels_last import ChannelsLast
from pl_fed.engine.products import FasterProducts, mkl_held_back
from pl_fed.evaluation.client_losses import ClientLosses
from pl_fed.evaluation.client_measures import ClientMeasures
from pl_fed.evaluation.monitor import Monitor, Tables, better, directions
from pl_fed.metrics import ClientMetrics
from pl_fed.nets.calls import Net
from pl_fed.nets.dropout import unkey_dropouts
from pl_fed.nets.modes import evaluation_mode
from pl_fed.torch_internals import has_operator_modes
from pl_fed.trees import Tree, gather, join, select, split, tree_map
from pl_fed.types import Batch

_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_BATCH = 1024  # samples that a model sees at once
_IMAGES = 128  # and a net with convolutions on a CPU, whose caches hold what it makes of so many
_STACK_BATCH = 4096  # and a stack of models
_ROWS_BYTES = 1 << 25  # rows of clients that are loaded at once


class Evaluator:
    """Runs the server's model and the clients' own on the clients' data.

    The global model sees the samples of many clients at once. Clients' own models are run many at
    once too, under ``torch.vmap``, where that pays: on a GPU, and on a CPU if no convolution is
    trained.

    Args:
        client: The algorithm.
        begin: Returns the round of clients, by ids, as an evaluation begins it.
        stacked: See the attribute.
        monitor: The metric by which the better one of two models is found: see
            :class:`pl_fed.Federation`.

    Attributes:
        stacked: Whether clients' own models are run many at once; ``None`` leaves it to the rule.
            It is set to ``False`` when they turn out not to stack.
    """

    def __init__(
        self,
        client: Client,
        begin: Callable[[Tensor], ClientRound],
        stacked: bool | None = None,
        monitor: str | None = None,
    ) -> None:
        self.client = client
        self._monitor = monitor
        self.stacked = stacked
        self._begin = begin
        layers = client.model("global").modules()
        self._convolves = any(isinstance(layer, nn.Conv2d) for layer in layers)

    @property
    def is_monitoring(self) -> bool:
        """Whether λ is chosen by a metric that was named, in place of the loss."""
        return self._monitor not in (None, "loss")

    def monitor(self, data: ClientData) -> Monitor:
        """Return the metric by which models of some data are chosen."""
        return Monitor.of(self._monitor, self.client.task, self.client.classes_of(data))

    def evaluate(
        self,
        data: ClientData,
        part: str,
        clients: Tensor,
        metrics: Mapping[str, ClientMetrics],
        hybrid: Mapping[str, str] | None = None,
        triggered: ClientData | None = None,
    ) -> None:
        """Add some clients to the metrics of some models.

        Args:
            data: The data of the federation.
            part: ``train``, ``val`` or ``test``.
            clients: Ids, int64 [clients].
            metrics: What to add to, by model.
            hybrid: By what part of the data the better one of a client's last model and the global
                one is found, for each name in the metrics that stands for it.
            triggered: The samples that show a trigger, with the targets that the attacker wants.
        """
        hybrid = hybrid or {}
        models = [model for model in metrics if model not in hybrid]
        tables = self._tables(data, part, clients, models)
        shown = {} if triggered is None else self._tables(triggered, part, clients, models)
        pair = ["global", models[-1]]
        for name, judge in hybrid.items():
            judged = tables if judge == part else self._tables(data, judge, clients, pair)
            one, another = (judged[model] for model in pair)
            other = better(one, another, self.monitor(data))
            for found in filter(None, (tables, shown)):
                pairs = zip(*(found[model] for model in pair))
                found[name] = Tables(*(_chosen(other, *columns) for columns in pairs))
        measured = list(directions(self.client.task))
        for model, metric in metrics.items():
            correct, count, loss, measures = tables[model]
            columns = {name: measures[:, k] for k, name in enumerate(measured)}
            ids, triggers = clients.to(loss.device), {}
            if shown:
                triggers = {
                    "misled": shown[model].correct.sum(1),
                    "triggered": shown[model].samples.sum(1),
                }
            metric.update(ids, correct, count, loss, **triggers, measures=columns)

    def _tables(
        self, data: ClientData, part: str, clients: Tensor, models: Iterable[str]
    ) -> dict[str, Tables]:
        """Return what the metrics of some models are made of."""
        models = list(models)
        sizes = data.part(part).sizes[clients]
        sums = {model: _Sums(self.client, data, sizes) for model in models}
        for model, position, index, outputs in self._outputs(data, part, clients, models):
            sums[model].add(position, index, outputs)
        return {model: each.tables for model, each in sums.items()}

    def tables(
        self, data: ClientData, part: str, clients: Tensor, models: Iterable[str]
    ) -> dict[str, Tables]:
        """Return how good some models are for each client, at any time: see :meth:`evaluate`."""
        with torch.no_grad(), evaluation_mode(self.client):
            return self._tables(data, part, clients, models)

    def models(self, clients: Tensor, model: str) -> Iterator[nn.Module]:
        """Yield a model of each client, as the user's net: a copy of its own, in evaluation mode.

        Args:
            clients: Ids, int64 [clients].
            model: Which model; the global one is the same for all.
        """
        if model == "global":
            yield from (self._plain(model) for _ in clients)
            return
        for some in clients.split(self._rows_at_once):
            rows = self._begin(some).models[model]
            for one in range(len(some)):
                with torch.inference_mode(False), ModelGuard(self.client, [model]):
                    self._fill(model, rows[one])
                    net = self._plain(model)
                yield net

    def copy_global_model(self) -> nn.Module:
        """Return a copy of the global model, as the user's net, in evaluation mode."""
        return self._plain("global")

    def _plain(self, model: str) -> nn.Module:
        """Return a copy of a model that shares nothing with the client."""
        draws = self.client.draws  # may hold what belongs to a step, and is not copied
        with torch.inference_mode(False), torch.no_grad():
            net = copy.deepcopy(self.client.model(model), {id(draws): draws})
            unkey_dropouts(net)
            for buffer in net.buffers():  # the copies lie in a copy of their row
                buffer.data = buffer.data.clone()
        return net.eval()

    def losses(
        self, data: ClientData, part: str, clients: Tensor, model: str, rows: ModelRows
    ) -> Tensor:
        """Return the mean loss of each client's own model, float64 [clients]; NaN without samples.

        Args:
            data: The data of the federation.
            part: ``train``, ``val`` or ``test``.
            clients: Ids, int64 [clients].
            model: Which model.
            rows: The clients' models.
        """
        tables = self._own_tables(data, part, clients, model, rows)
        return tables.loss / tables.samples.sum(1)

    def _own_tables(
        self,
        data: ClientData,
        part: str,
        clients: Tensor,
        model: str,
        rows: ModelRows,
        measures: bool = False,
    ) -> Tables:
        """Return how good each client's own model is."""
        sizes = data.part(part).sizes[clients]
        sums, order = _Sums(self.client, data, sizes, measures), _largest_first(sizes)
        samples = self._samples(data, part, clients[order])
        with torch.no_grad(), evaluation_mode(self.client):
            for position, index, outputs in self._own(model, rows[order], samples):
                sums.add(order.to(position.device)[position], index, outputs)
        return sums.tables

    def scores(
        self, data: ClientData, part: str, clients: Tensor, model: str, rows: ModelRows
    ) -> Tensor:
        """Return how bad each client's own model is by the monitored metric, float64 [clients].

        Lower is better; it is NaN without samples. See :meth:`losses` for the arguments.
        """
        tables = self._own_tables(data, part, clients, model, rows, measures=True)
        return -self.monitor(data).score(tables)

    def start_losses(
        self, data: ClientData, clients: Tensor, poison: Mapping[int, Callable[[Batch], Batch]]
    ) -> Tensor:
        """Return the mean loss of the global model over each client's training data.

        Args:
            data: The data of the federation.
            clients: Ids, int64 [clients].
            poison: What byzantine clients do to their data, by id.

        Returns:
            float64 [clients].
        """
        module, samples = self.client.model("global"), self._samples(data, "train", clients)
        losses = ClientLosses.of(self.client, samples.sizes, data.device)
        with torch.no_grad(), evaluation_mode(self.client):
            for position, index in samples.joined():
                outputs = self._run(module, data.inputs_of(index))
                losses.add(position, outputs, select(data.targets, index))
            for one, client in enumerate(clients.tolist()):
                if client in poison:
                    losses.forget(one)
                    for position, index in samples.of(one):
                        batch = poison[client](data.batch(index))
                        losses.add(position, self._run(module, batch.inputs), batch.targets)
        return losses.means

    def predict(self, data: ClientData, clients: Tensor, model: str) -> list[dict[str, Any]]:
        """Return each client's predictions on its own test samples.

        Returns:
            For each client a dict with ``client`` (id), ``sample`` (ids in the data set),
            ``target``, and what the task predicts: for classes ``prediction`` and ``probability``
            (the predicted class's), else ``prediction``, in the shape of ``target`` if it fits.
        """
        pieces = list(self._outputs(data, "test", clients, [model]))
        if not pieces:
            return [self._table(data, one, None) for one in clients.tolist()]
        order = torch.cat([position for _, position, _, _ in pieces]).argsort(stable=True)
        outputs = select(join([outputs for *_, outputs in pieces]), order)
        sizes = data.test.sizes[clients].tolist()
        return [
            self._table(data, one, own if size else None)
            for one, own, size in zip(clients.tolist(), split(outputs, sizes), sizes)
        ]

    def _table(self, data: ClientData, client: int, outputs: Tree | None) -> dict[str, Any]:
        """Return the predictions for a client, from the outputs on its test samples."""
        index = data.test.samples(client)
        samples = index.cpu()
        table: dict[str, Any] = {
            "client": client,
            "sample": samples if data.ids is None else data.ids[samples],
            "target": tree_map(Tensor.cpu, select(data.targets, index)),
        }
        if outputs is None:
            table["prediction"] = select(table["target"], slice(0, 0))
            table["probability"] = torch.empty(0)
            return table
        table |= self.client.task.predictions(tree_map(Tensor.cpu, outputs))
        prediction, target = table["prediction"], table["target"]
        fits = isinstance(prediction, Tensor) and isinstance(target, Tensor)
        if fits and prediction.numel() == target.numel():  # an output a sample: [samples, 1]
            table["prediction"] = prediction.reshape(target.shape)
        return table

    def _outputs(
        self, data: ClientData, part: str, clients: Tensor, models: Iterable[str]
    ) -> Iterator[tuple[str, Tensor, Tensor, Tree]]:
        """Yield (model, which of the clients, sample, outputs) in batches."""
        own = [model for model in models if model != "global"]
        if "global" in models:
            samples = self._samples(data, part, clients)
            module = self.client.model("global")
            for position, index in samples.joined():
                outputs = self._run(module, data.inputs_of(index))
                yield "global", position, index, outputs
        if not own:
            return
        for positions in self._pieces(data.part(part).sizes[clients]):
            models = self._begin(clients[positions]).models
            samples = self._samples(data, part, clients[positions])
            positions = positions.to(data.device)
            for model in own:
                for position, index, outputs in self._own(model, models[model], samples):
                    yield model, positions[position], index, outputs

    def _samples(self, data: ClientData, part: str, clients: Tensor) -> "_Samples":
        """Return where some clients' samples are, in batches of a size that suits the net."""
        return _Samples(data, part, clients, _IMAGES if self._convolves_on_cpu else _BATCH)

    @property
    def _convolves_on_cpu(self) -> bool:
        return self._convolves and self.client.device.type == "cpu"

    def _pieces(self, sizes: Tensor) -> Iterator[Tensor]:
        """Yield positions of clients that have samples, and that fit into memory together."""
        yield from _largest_first(sizes).split(self._rows_at_once)

    @property
    def _rows_at_once(self) -> int:
        row = self.client.row("global").data
        return max(1, _ROWS_BYTES // (row.nbytes * len(self.client.models)))

    def _own(
        self, model: str, rows: ModelRows, samples: "_Samples"
    ) -> Iterator[tuple[Tensor, Tensor, Tree]]:
        """Yield (which of the clients, sample, outputs) of a model that each client has its own."""
        if len(samples.sizes) > 1 and samples.sizes.any() and self._stacks(model):
            stack = self._many_at_once(model, rows, samples)
            try:
                first = next(stack)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # if it is not the stacking, it will come again below
                self.stacked = False
                reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
                rank_zero_info(f"Personal models are evaluated one by one, not stacked: {reason}")
            else:
                yield first
                yield from stack
                return
        yield from self._one_by_one(model, rows, samples)

    def _stacks(self, model: str) -> bool:
        device = self.client.device.type
        if not self.client.averages_samples:  # all outputs of a client are kept, so one by one
            return False
        if torch.is_autocast_enabled(device):  # which has no effect under vmap
            return False
        if self.stacked is None:
            return device == "cuda" or not trains_convolutions(self.client.model(model))
        return self.stacked

    def _one_by_one(
        self, model: str, rows: ModelRows, samples: "_Samples"
    ) -> Iterator[tuple[Tensor, Tensor, Tree]]:
        module = self.client.model(model)
        with ModelGuard(self.client, [model]):
            for one in range(len(samples.sizes)):
                self._fill(model, rows[one])
                for position, index in samples.of(one):
                    inputs = samples.data.inputs_of(index)
                    yield position, index, self._run(module, inputs)

    def _run(self, module: nn.Module, inputs: Tree) -> Tree:
        """Return a model's outputs; on the CPU by the faster ones of its kernels."""
        on_cpu = self.client.device.type == "cpu" and has_operator_modes()
        with (
            ChannelsLast() if on_cpu and self._convolves else nullcontext(),
            FasterProducts() if on_cpu and mkl_held_back() else nullcontext(),
        ):
            return self.client.task.predict(module, inputs)

    def _fill(self, model: str, rows: ModelRows) -> None:
        """Write one client's parameters and running statistics into a model."""
        self.client.row(model).data.copy_(rows.parameters)
        self.client.statistics(model).data.copy_(rows.statistics)

    def _many_at_once(
        self, model: str, rows: ModelRows, samples: "_Samples"
    ) -> Iterator[tuple[Tensor, Tensor, Tree]]:
        client, task = self.client, self.client.task
        module = client.model(model)
        tensors = client.row(model).layout.views(rows.parameters)
        tensors |= client.statistics(model).layout.views(rows.statistics)
        stack = torch.vmap(
            lambda own, inputs: task.predict(Net(module, own), inputs), randomness="error"
        )
        for table, inside in samples.padded():
            own = {name: tensor[: len(table)] for name, tensor in tensors.items()}
            rows = samples.data.inputs_of(table.flatten())
            inputs = tree_map(lambda leaf: leaf.unflatten(0, table.shape), rows)  # noqa: B023
            flat = tree_map(lambda leaf: leaf.flatten(0, 1), stack(own, inputs))
            outputs = gather(flat, inside)
            position = inside.div(table.shape[1], rounding_mode="floor")
            yield position, table.flatten()[inside], outputs


def _largest_first(sizes: Tensor) -> Tensor:
    """Return the positions of clients that have samples; those of equal size are padded least."""
    return sizes.argsort(descending=True, stable=True)[: int((sizes > 0).sum())]


class _Samples:
    """Where some clients' samples are."""

    def __init__(self, data: ClientData, part: str, clients: Tensor, batch: int) -> None:
        self.data = data
        self.part = data.part(part)
        self.batch = batch
        self.begins = self.part.offsets[clients]
        self.sizes = self.part.sizes[clients]

    def joined(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (which of the clients, sample) of all of them, in batches."""
        if not self.sizes.any():
            return
        index = self.part.index
        begins = self.begins - (self.sizes.cumsum(0) - self.sizes)
        places = torch.arange(int(self.sizes.sum())) + begins.repeat_interleave(self.sizes)
        position = torch.repeat_interleave(self.sizes).to(index.device)
        places = places.to(index.device)
        for each, chosen in zip(position.split(self.batch), places.split(self.batch)):
            yield each, index[chosen]

    def of(self, one: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of one client: its position, once for each sample, and the samples."""
        begin, size = int(self.begins[one]), int(self.sizes[one])
        for index in self.part.index[begin : begin + size].split(self.batch):
            yield torch.full_like(index, one), index

    def padded(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield tables of samples, of clients in descending order of size.

        Yields:
            Samples [clients, width], those that have none left being left out; and where in the
            flattened table there is one, int64.
        """
        device, index = self.part.index.device, self.part.index
        width = max(1, _STACK_BATCH // len(self.sizes))
        for first in range(0, int(self.sizes[0]), width):
            left = self.sizes[self.sizes > first] - first
            slots = torch.arange(min(width, int(left[0])))
            inside = slots < left[:, None]
            places = (self.begins[: len(left)] + first)[:, None] + slots.minimum(left[:, None] - 1)
            yield index[places.to(device)], inside.flatten().nonzero().flatten().to(device)


class _Sums:
    """What the metrics of a model are made of, for each of some clients."""

    def __init__(
        self, client: Client, data: ClientData, sizes: Tensor, measures: bool = True
    ) -> None:
        self._data = data
        self._classes = client.classes_of(data)
        self._shape = (len(sizes), max(1, self._classes))
        device = data.device
        self._count = torch.zeros(len(sizes) * self._shape[1], dtype=torch.int64, device=device)
        self._correct = torch.zeros_like(self._count)
        self._losses = ClientLosses.of(client, sizes, device)
        self._measures = ClientMeasures(client.task, sizes, device) if measures else None

    def add(self, position: Tensor, index: Tensor, outputs: Tree) -> None:
        """Add samples, of the clients at these positions."""
        targets = select(self._data.targets, index)
        self._losses.add(position, outputs, targets)
        if self._measures is not None:
            self._measures.add(position, outputs, targets)
        cell = position
        if self._classes:
            cell = position * self._shape[1] + targets
            self._correct.index_add_(0, cell, (outputs.argmax(1) == targets).to(torch.int64))
        self._count.index_add_(0, cell, torch.ones_like(cell))

    @property
    def tables(self) -> Tables:
        """What was added up."""
        count = self._count.view(self._shape)
        loss = self._losses.means * count.sum(1)
        nothing = loss.new_empty(len(loss), 0)
        measures = nothing if self._measures is None else self._measures.values
        return Tables(self._correct.view(self._shape), count, loss, measures)


def _chosen(other: Tensor, one: Tensor, another: Tensor) -> Tensor:
    return torch.where(other if one.dim() == 1 else other[:, None], another, one)


def trains_convolutions(net: nn.Module) -> bool:
    """Return whether a net has convolutions that are not frozen.

    With weights of their own for each client they take up to twice as long under vmap on a CPU.
    """
    convolutions = (layer for layer in net.modules() if isinstance(layer, _CONVOLUTIONS))
    return any(layer.weight.requires_grad for layer in convolutions)
