"""The evaluator: runs models on the clients' own data, for metrics and predictions."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, ModelRows
from pl_fed.clients.kept_parts import kept_parts, lay_rows
from pl_fed.clients.model_guard import ModelGuard
from pl_fed.clients.optimizer_options import OptionGuard
from pl_fed.data.client_data import ClientData
from pl_fed.engine.channels_last import ChannelsLast
from pl_fed.engine.products import FasterProducts, is_mkl_slow
from pl_fed.engine.rule import CONVOLUTIONS
from pl_fed.evaluation.client_losses import ClientLosses
from pl_fed.evaluation.client_measures import ClientMeasures
from pl_fed.evaluation.monitor import Monitor, Tables, metric_directions, prefer_second
from pl_fed.evaluation.step_evaluation import StepEvaluation
from pl_fed.metrics import ClientMetrics
from pl_fed.nets.calls import Net
from pl_fed.nets.dropout import unkey_dropouts
from pl_fed.nets.kept_values import Part, ValueGuard
from pl_fed.nets.modes import evaluation_mode
from pl_fed.nets.rows import count_as_integers
from pl_fed.preflight.step_rules import refuse_evaluation_changes
from pl_fed.random import fork_all_generators, fork_torch_rng
from pl_fed.tasks import LightningTask
from pl_fed.torch_internals import has_operator_modes
from pl_fed.trees import Tree, gather, join, select, split, tree_map
from pl_fed.types import Batch

_BATCH = 1024  # samples in a batch
_CONVOLUTION_BATCH = 128  # samples in a batch of a convolutional net on a CPU, to fit the caches
_STACK_BATCH = 4096  # samples in a batch of a stack of models
_ROWS_BYTES = 1 << 25  # bytes of the clients' rows that are loaded at once


class Evaluator:
    """Evaluator: runs the global model and the personal models on the clients' data.

    The global model sees samples of several clients in one batch. Personal models of several
    clients run at once under ``torch.vmap`` if this is faster: on a GPU, and on a CPU if no
    convolution is trained.

    Args:
        client: The algorithm.
        begin: Returns clients, by their ids, at the start of an evaluation.
        stacked: See the attribute.
        monitor: The metric that selects the better one of two models: see
            :class:`pl_fed.Federation`.

    Attributes:
        stacked: Whether personal models of several clients run at once; ``None`` decides by the
            rule above. It becomes ``False`` if the models cannot be stacked.
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
        self._parts: list[Part] | None = None
        self._guard: ValueGuard | None = None  # of the evaluation that runs now
        self._restores = True  # after each client; until an evaluation has changed nothing
        self._has_changes = False
        self._changed_values: set[str] = set()
        layers = client.model("global").modules()
        self._convolves = any(isinstance(layer, nn.Conv2d) for layer in layers)

    @contextmanager
    def _restore_values(self) -> Iterator[None]:
        """Restore what an evaluation changes in modules and in generators of random numbers."""
        if self._guard is not None:
            yield
            return
        if self._parts is None:
            self._parts = kept_parts(self.client)
        with fork_all_generators(), fork_torch_rng(self.client.device):
            lay_rows(self.client)
            self._guard = ValueGuard(self._parts, self._list_loaded_buffers())
            options = OptionGuard.guard_trainer(self.client)
            self._changed_values.clear()
            try:
                yield
            finally:
                self._changed_values |= {*self._guard.restore()}
                self._has_changes |= bool(self._changed_values)
                self._restores, self._guard = self._has_changes, None
                changed_options = options.restore()
        net = type(self.client.global_model).__name__
        refuse_evaluation_changes("validation_step", net, self._changed_values, changed_options)

    def _list_loaded_buffers(self) -> list[Tensor]:
        """Return the running statistics of models that are loaded client by client."""
        names = [name for name in self.client.models if name != "global"]
        rows = [self.client.statistics(name) for name in names]
        return [tensor for row in rows for tensor in row.tensors.values()]

    def _restore(self) -> None:
        """Restore what the last batch or client has changed, so that no other one sees it."""
        if self._guard is not None and self._restores:
            self._changed_values |= {*self._guard.restore()}
            self._has_changes |= bool(self._changed_values)

    @property
    def is_monitoring(self) -> bool:
        """Whether a metric replaces the loss in the choice of λ (``federation.monitor``)."""
        return self._monitor not in (None, "loss")

    def monitor(self, data: ClientData) -> Monitor:
        """Return the metric that selects models on the given data."""
        return Monitor.from_name(self._monitor, self.client.task, self.client.count_classes(data))

    def evaluate(
        self,
        data: ClientData,
        part: str,
        clients: Tensor,
        metrics: Mapping[str, ClientMetrics],
        hybrid: Mapping[str, str] | None = None,
        triggered: ClientData | None = None,
    ) -> None:
        """Add clients to the metrics of models.

        Args:
            data: The data of the federation.
            part: ``train``, ``val`` or ``test``.
            clients: Client ids, int64 [clients].
            metrics: The metrics to update, by model. A hybrid model is the better one of a client's
                global model and last model.
            hybrid: The part of the data that selects the better model, by the name of the hybrid
                model in ``metrics``.
            triggered: The samples with a backdoor trigger, and the attacker's targets.
        """
        hybrid = hybrid or {}
        models = [model for model in metrics if model not in hybrid]
        tables = self._compute_tables(data, part, clients, models)
        triggered_tables: dict[str, Tables] = {}
        if triggered is not None:
            triggered_tables = self._compute_tables(triggered, part, clients, models)
        pair = ["global", models[-1]]
        for name, selection_part in hybrid.items():
            selection = tables
            if selection_part != part:
                selection = self._compute_tables(data, selection_part, clients, pair)
            first, second = (selection[model] for model in pair)
            prefers_second = prefer_second(first, second, self.monitor(data))
            for results in filter(None, (tables, triggered_tables)):
                columns = zip(*(results[model] for model in pair))
                results[name] = Tables(*(_select(prefers_second, *both) for both in columns))
        measure_names = list(metric_directions(self.client.task))
        for model, metric in metrics.items():
            correct, count, loss, values = tables[model]
            measures = {name: values[:, column] for column, name in enumerate(measure_names)}
            ids, triggers = clients.to(loss.device), {}
            if triggered_tables:
                triggers = {
                    "misled": triggered_tables[model].correct.sum(1),
                    "triggered": triggered_tables[model].samples.sum(1),
                }
            metric.update(ids, correct, count, loss, **triggers, measures=measures)

    def _compute_tables(
        self, data: ClientData, part: str, clients: Tensor, models: Iterable[str]
    ) -> dict[str, Tables]:
        """Return the results of each model for each client."""
        models = list(models)
        sizes = data.part(part).sizes[clients]
        with self._restore_values():
            if self.client.task.runs_steps:
                return {model: self._step_tables(data, part, clients, model) for model in models}
            sums = {model: _Sums(self.client, data, sizes) for model in models}
            for model, position, index, outputs in self._run_models(data, part, clients, models):
                sums[model].add(position, index, outputs)
            return {model: model_sums.tables for model, model_sums in sums.items()}

    def tables(
        self, data: ClientData, part: str, clients: Tensor, models: Iterable[str]
    ) -> dict[str, Tables]:
        """Return the results of each model for each client; also callable in training mode."""
        with torch.no_grad(), evaluation_mode(self.client):
            return self._compute_tables(data, part, clients, models)

    def models(self, clients: Tensor, model: str) -> Iterator[nn.Module]:
        """Yield a copy of each client's model, as the user's net in evaluation mode.

        Args:
            clients: Client ids, int64 [clients].
            model: The name of the model; the global model is the same for all clients.
        """
        if model == "global":
            yield from (self._copy_model(model) for _ in clients)
            return
        for ids in clients.split(self._max_clients):
            rows = self._begin(ids).models[model]
            for position in range(len(ids)):
                with torch.inference_mode(False), ModelGuard(self.client, [model]):
                    self._load_rows(model, rows[position])
                    net = self._copy_model(model)
                yield net

    def copy_global_model(self) -> nn.Module:
        """Return a copy of the global model, as the user's net, in evaluation mode."""
        return self._copy_model("global")

    def _copy_model(self, model: str) -> nn.Module:
        """Return a copy of a model that shares no tensor with the client."""
        draws = self.client.draws  # not copied: it may hold tensors of a step
        with torch.inference_mode(False), torch.no_grad():
            net = copy.deepcopy(self.client.model(model), {id(draws): draws})
            unkey_dropouts(net)
            count_as_integers(net)
            for buffer in net.buffers():  # the copied buffers are views of a copied row
                buffer.data = buffer.data.clone()
        return net.eval()

    def losses(
        self, data: ClientData, part: str, clients: Tensor, model: str, rows: ModelRows
    ) -> Tensor:
        """Return the mean loss of each client's own model, float64 [clients]; NaN without samples.

        Args:
            data: The data of the federation.
            part: ``train``, ``val`` or ``test``.
            clients: Client ids, int64 [clients].
            model: The name of the model.
            rows: The clients' models.
        """
        tables = self._personal_tables(data, part, clients, model, rows)
        return tables.loss / tables.samples.sum(1)

    def _personal_tables(
        self,
        data: ClientData,
        part: str,
        clients: Tensor,
        model: str,
        rows: ModelRows,
        measures: bool = False,
    ) -> Tables:
        """Return the results of each client's own model."""
        sizes = data.part(part).sizes[clients]
        if self.client.task.runs_steps:
            with torch.no_grad(), evaluation_mode(self.client), self._restore_values():
                return self._step_tables(data, part, clients, model, rows)
        sums, order = _Sums(self.client, data, sizes, measures), _sort_by_size(sizes)
        samples = self._samples(data, part, clients[order])
        with torch.no_grad(), evaluation_mode(self.client), self._restore_values():
            for position, index, outputs in self._run_personal(model, rows[order], samples):
                sums.add(order.to(position.device)[position], index, outputs)
        return sums.tables

    def scores(
        self, data: ClientData, part: str, clients: Tensor, model: str, rows: ModelRows
    ) -> Tensor:
        """Return the negative monitored metric of each client's own model, float64 [clients].

        Lower is better; the value is NaN without samples. The arguments are those of
        :meth:`losses`.
        """
        tables = self._personal_tables(data, part, clients, model, rows, measures=True)
        return -self.monitor(data).score(tables)

    def start_losses(
        self, data: ClientData, clients: Tensor, poison: Mapping[int, Callable[[Batch], Batch]]
    ) -> Tensor:
        """Return the mean loss of the global model over each client's training data.

        Args:
            data: The data of the federation.
            clients: Client ids, int64 [clients].
            poison: The functions that change the data of Byzantine clients, by client id.

        Returns:
            float64 [clients].
        """
        if self.client.task.runs_steps:
            return self._start_losses_of_steps(data, clients, poison)
        module, samples = self.client.model("global"), self._samples(data, "train", clients)
        losses = ClientLosses.create(self.client, samples.sizes, data.device)
        with torch.no_grad(), evaluation_mode(self.client), self._restore_values():
            for position, index in samples.batches():
                outputs = self._predict(module, data.inputs_of(index))
                losses.add(position, outputs, select(data.targets, index))
            for number, client in enumerate(clients.tolist()):
                if client in poison:
                    losses.forget(number)
                    for position, index in samples.client_batches(number):
                        batch = poison[client](data.batch(index))
                        losses.add(position, self._predict(module, batch.inputs), batch.targets)
        return losses.means

    def predict(self, data: ClientData, clients: Tensor, model: str) -> list[dict[str, Any]]:
        """Return each client's predictions on its own test samples.

        Returns:
            For each client a dict with ``client`` (id), ``sample`` (ids in the data set),
            ``target``, and the task's predictions: ``prediction``, and for classes
            ``probability`` of the predicted class. Predictions without classes have the shape of
            ``target`` if it fits.
        """
        with self._restore_values():
            if self.client.task.runs_steps:
                return self._predict_by_steps(data, clients, model)
            pieces = list(self._run_models(data, "test", clients, [model]))
        if not pieces:
            return [self._predictions(data, client, None) for client in clients.tolist()]
        order = torch.cat([position for _, position, _, _ in pieces]).argsort(stable=True)
        outputs = select(join([outputs for *_, outputs in pieces]), order)
        sizes = data.test.sizes[clients].tolist()
        return [
            self._predictions(data, client, client_outputs if size else None)
            for client, client_outputs, size in zip(clients.tolist(), split(outputs, sizes), sizes)
        ]

    def _predictions(self, data: ClientData, client: int, outputs: Tree | None) -> dict[str, Any]:
        """Return the table of a client's predictions, from the outputs on its test samples."""
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
        if fits and prediction.numel() == target.numel():  # outputs [samples, 1]
            table["prediction"] = prediction.reshape(target.shape)
        return table

    # Evaluation by the steps of a LightningModule

    def _evaluate_steps(
        self, data: ClientData, part: str, clients: Tensor, model: str
    ) -> StepEvaluation:
        """Return the evaluation of a model by the steps of the net."""
        task = cast(LightningTask, self.client.task)
        samples = self._samples(data, part, clients)
        return StepEvaluation(task, self.client.model(model), samples, clients)

    def _step_tables(
        self,
        data: ClientData,
        part: str,
        clients: Tensor,
        model: str,
        rows: ModelRows | None = None,
    ) -> Tables:
        """Return the results of a model for each client; by default its current models."""
        evaluation = self._evaluate_steps(data, part, clients, model)
        for position in self._load_clients(clients, evaluation.samples.sizes, model, rows):
            evaluation.evaluate(position, part)
        return evaluation.tables

    def _start_losses_of_steps(
        self, data: ClientData, clients: Tensor, poison: Mapping[int, Callable[[Batch], Batch]]
    ) -> Tensor:
        """Return the mean loss of the global model over each client's training data."""
        evaluation = self._evaluate_steps(data, "train", clients, "global")
        with torch.no_grad(), evaluation_mode(self.client), self._restore_values():
            for position, client in enumerate(clients.tolist()):
                evaluation.measure_training_loss(position, poison.get(client))
                self._restore()
        return evaluation.losses

    def _predict_by_steps(
        self, data: ClientData, clients: Tensor, model: str
    ) -> list[dict[str, Any]]:
        """Return each client's predictions on its own test samples."""
        evaluation = self._evaluate_steps(data, "test", clients, model)
        outputs = {
            position: evaluation.predict(position)
            for position in self._load_clients(clients, evaluation.samples.sizes, model)
        }
        return [
            self._predictions(data, client, outputs.get(position))
            for position, client in enumerate(clients.tolist())
        ]

    def _load_clients(
        self, clients: Tensor, sizes: Tensor, model: str, rows: ModelRows | None = None
    ) -> Iterator[int]:
        """Yield the position of each client with samples while its model is loaded.

        Args:
            clients: Client ids, int64 [clients].
            sizes: Number of samples of each client.
            model: The name of the model.
            rows: The clients' models; by default those at the start of an evaluation.
        """
        if model == "global" and rows is None:
            for position in sizes.nonzero().flatten().tolist():
                yield position
                self._restore()
            return
        for positions in self._split_clients(sizes):
            own = self._begin(clients[positions]).models[model] if rows is None else rows[positions]
            with ModelGuard(self.client, [model]):
                for number, position in enumerate(positions.tolist()):
                    self._load_rows(model, own[number])
                    yield position
                    self._restore()

    def _run_models(
        self, data: ClientData, part: str, clients: Tensor, models: Iterable[str]
    ) -> Iterator[tuple[str, Tensor, Tensor, Tree]]:
        """Yield (model, positions of clients, sample ids, outputs) in batches."""
        personal = [model for model in models if model != "global"]
        if "global" in models:
            samples = self._samples(data, part, clients)
            module = self.client.model("global")
            for position, index in samples.batches():
                outputs = self._predict(module, data.inputs_of(index))
                self._restore()
                yield "global", position, index, outputs
        if not personal:
            return
        for positions in self._split_clients(data.part(part).sizes[clients]):
            models = self._begin(clients[positions]).models
            samples = self._samples(data, part, clients[positions])
            positions = positions.to(data.device)
            for model in personal:
                for position, index, outputs in self._run_personal(model, models[model], samples):
                    yield model, positions[position], index, outputs

    def _samples(self, data: ClientData, part: str, clients: Tensor) -> "_Samples":
        """Return the samples of clients, in batches of a size that suits the net."""
        return _Samples(
            data, part, clients, _CONVOLUTION_BATCH if self._convolves_on_cpu else _BATCH
        )

    @property
    def _convolves_on_cpu(self) -> bool:
        return self._convolves and self.client.device.type == "cpu"

    def _split_clients(self, sizes: Tensor) -> Iterator[Tensor]:
        """Yield positions of clients with samples, in groups that fit into memory together."""
        yield from _sort_by_size(sizes).split(self._max_clients)

    @property
    def _max_clients(self) -> int:
        """The largest number of clients for which rows are loaded at once."""
        row = self.client.row("global").data
        return max(1, _ROWS_BYTES // (row.nbytes * len(self.client.models)))

    def _run_personal(
        self, model: str, rows: ModelRows, samples: "_Samples"
    ) -> Iterator[tuple[Tensor, Tensor, Tree]]:
        """Yield (positions of clients, sample ids, outputs) of the clients' own models."""
        if len(samples.sizes) > 1 and samples.sizes.any() and self._stacks(model):
            stack = self._run_stacked(model, rows, samples)
            try:
                first = next(stack)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # an error without stacking appears again below
                self.stacked = False
                reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
                rank_zero_info(f"Personal models are evaluated one by one, not stacked: {reason}")
            else:
                yield first
                yield from stack
                return
        yield from self._run_one_by_one(model, rows, samples)

    def _stacks(self, model: str) -> bool:
        """Return whether to run a personal model of several clients at once."""
        device = self.client.device.type
        if not self.client.averages_samples:  # one by one, as a client's outputs are collected
            return False
        if torch.is_autocast_enabled(device):  # autocast has no effect under vmap
            return False
        if self.stacked is None:
            return device == "cuda" or not trains_convolutions(self.client.model(model))
        return self.stacked

    def _run_one_by_one(
        self, model: str, rows: ModelRows, samples: "_Samples"
    ) -> Iterator[tuple[Tensor, Tensor, Tree]]:
        module = self.client.model(model)
        with ModelGuard(self.client, [model]):
            for number in range(len(samples.sizes)):
                self._load_rows(model, rows[number])
                for position, index in samples.client_batches(number):
                    inputs = samples.data.inputs_of(index)
                    yield position, index, self._predict(module, inputs)
                self._restore()

    def _predict(self, module: nn.Module, inputs: Tree) -> Tree:
        """Return a model's outputs; on a CPU with faster kernels."""
        on_cpu = self.client.device.type == "cpu" and has_operator_modes()
        with (
            ChannelsLast() if on_cpu and self._convolves else nullcontext(),
            FasterProducts() if on_cpu and is_mkl_slow() else nullcontext(),
        ):
            return self.client.task.predict(module, inputs)

    def _load_rows(self, model: str, rows: ModelRows) -> None:
        """Write one client's parameters and running statistics into a model."""
        self.client.row(model).data.copy_(rows.parameters)
        self.client.statistics(model).data.copy_(rows.statistics)

    def _run_stacked(
        self, model: str, rows: ModelRows, samples: "_Samples"
    ) -> Iterator[tuple[Tensor, Tensor, Tree]]:
        client, task = self.client, self.client.task
        module = client.model(model)
        tensors = client.row(model).layout.views(rows.parameters)
        tensors |= client.statistics(model).layout.views(rows.statistics)
        stack = torch.vmap(
            lambda weights, inputs: task.predict(Net(module, weights), inputs), randomness="error"
        )
        for table, valid in samples.padded_tables():
            weights = {name: tensor[: len(table)] for name, tensor in tensors.items()}
            flat_inputs = samples.data.inputs_of(table.flatten())
            inputs = tree_map(lambda leaf: leaf.unflatten(0, table.shape), flat_inputs)  # noqa: B023
            flat_outputs = tree_map(lambda leaf: leaf.flatten(0, 1), stack(weights, inputs))
            position = valid.div(table.shape[1], rounding_mode="floor")
            yield position, table.flatten()[valid], gather(flat_outputs, valid)


def _sort_by_size(sizes: Tensor) -> Tensor:
    """Return the positions of clients with samples in descending order of size.

    Clients of similar size need little padding.
    """
    return sizes.argsort(descending=True, stable=True)[: int((sizes > 0).sum())]


class _Samples:
    """Samples: the ids of clients' samples in batches.

    Args:
        data: The data of the federation.
        part: ``train``, ``val`` or ``test``.
        clients: Client ids, int64 [clients].
        batch: Number of samples in a batch.
    """

    def __init__(self, data: ClientData, part: str, clients: Tensor, batch: int) -> None:
        self.data = data
        self.part = data.part(part)
        self.batch = batch
        self.begins = self.part.offsets[clients]
        self.sizes = self.part.sizes[clients]

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (positions of clients, sample ids) of all clients, in batches."""
        if not self.sizes.any():
            return
        index = self.part.index
        begins = self.begins - (self.sizes.cumsum(0) - self.sizes)
        places = torch.arange(int(self.sizes.sum())) + begins.repeat_interleave(self.sizes)
        position = torch.repeat_interleave(self.sizes).to(index.device)
        places = places.to(index.device)
        batches = zip(position.split(self.batch), places.split(self.batch))
        for batch_position, batch_places in batches:
            yield batch_position, index[batch_places]

    def client_batches(self, position: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (position, repeated for each sample; sample ids) of one client, in batches."""
        begin, size = int(self.begins[position]), int(self.sizes[position])
        for index in self.part.index[begin : begin + size].split(self.batch):
            yield torch.full_like(index, position), index

    def padded_tables(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield padded tables of sample ids; clients must be in descending order of size.

        Yields:
            Sample ids [clients, width] of the clients with further samples; and the positions of
            the samples, without padding, in the flattened table, int64.
        """
        device, index = self.part.index.device, self.part.index
        width = max(1, _STACK_BATCH // len(self.sizes))
        for first in range(0, int(self.sizes[0]), width):
            remaining = self.sizes[self.sizes > first] - first
            slots = torch.arange(min(width, int(remaining[0])))
            is_sample = slots < remaining[:, None]
            begins = (self.begins[: len(remaining)] + first)[:, None]
            places = begins + slots.minimum(remaining[:, None] - 1)
            yield index[places.to(device)], is_sample.flatten().nonzero().flatten().to(device)


class _Sums:
    """Sums: accumulates a model's results for each client.

    Args:
        client: The algorithm.
        data: The data of the federation.
        sizes: Number of samples of each client, int64 [clients].
        measures: Whether to compute the task's metrics.
    """

    def __init__(
        self, client: Client, data: ClientData, sizes: Tensor, measures: bool = True
    ) -> None:
        self._data = data
        self._classes = client.count_classes(data)
        self._shape = (len(sizes), max(1, self._classes))
        device = data.device
        self._count = torch.zeros(len(sizes) * self._shape[1], dtype=torch.int64, device=device)
        self._correct = torch.zeros_like(self._count)
        self._losses = ClientLosses.create(client, sizes, device)
        self._measures = ClientMeasures(client.task, sizes, device) if measures else None

    def add(self, position: Tensor, index: Tensor, outputs: Tree) -> None:
        """Add samples: their clients' positions, their ids, and the outputs for them."""
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
        """The results of all added samples."""
        count = self._count.view(self._shape)
        loss = self._losses.means * count.sum(1)
        no_measures = loss.new_empty(len(loss), 0)
        measures = no_measures if self._measures is None else self._measures.values
        return Tables(self._correct.view(self._shape), count, loss, measures)


def _select(prefers_second: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the rows of the preferred model, by a mask of clients, bool [clients]."""
    mask = prefers_second if first.dim() == 1 else prefers_second[:, None]
    return torch.where(mask, second, first)


def trains_convolutions(net: nn.Module) -> bool:
    """Return whether a net has trainable convolutions.

    With separate weights for each client, convolutions under vmap on a CPU take up to twice the
    time.
    """
    convolutions = (layer for layer in net.modules() if isinstance(layer, CONVOLUTIONS))
    return any(layer.weight.requires_grad for layer in convolutions)
