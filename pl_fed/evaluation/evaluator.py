"""The evaluator: runs models on the clients' own data, for metrics and predictions."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, ModelRows
from pl_fed.clients.model_guard import restore_models
from pl_fed.data.client_data import ClientData
from pl_fed.evaluation.client_losses import ClientLosses
from pl_fed.evaluation.client_measures import ClientMeasures
from pl_fed.evaluation.model_runner import ModelRunner, SampleBatches, sort_by_size
from pl_fed.evaluation.monitor import Monitor, Tables, prefer_second
from pl_fed.evaluation.restored_values import RestoredValues
from pl_fed.evaluation.smoothing import Smoothing
from pl_fed.evaluation.step_evaluation import StepEvaluation
from pl_fed.functional.group_fairness import add_group_counts
from pl_fed.metrics import ClientMetrics
from pl_fed.nets.dropout import unkey_dropouts
from pl_fed.nets.modes import evaluation_mode
from pl_fed.nets.rows import count_as_integers
from pl_fed.tasks import LightningTask
from pl_fed.tasks.step_predictions import PerSample
from pl_fed.trees import Tree, join, select, split, tree_map
from pl_fed.types import Batch


class Evaluator:
    """Evaluator: measures models on the clients' own data, for metrics, choices and predictions.

    Args:
        client: The algorithm.
        begin: Returns clients, by their ids, at the start of an evaluation.
        stacked: Whether personal models of several clients run at once: see :class:`ModelRunner`.
        monitor: The metric that selects the better one of two models: see
            :class:`pl_fed.Federation`.
        smoothing: The copies whose votes are the model ``smoothed``; ``None`` without this model.
        seed: The seed of their noise.

    Attributes:
        runner: Runs models on the clients' samples.
    """

    def __init__(
        self,
        client: Client,
        begin: Callable[[Tensor], ClientRound],
        stacked: bool | None = None,
        monitor: str | None = None,
        smoothing: Smoothing | None = None,
        seed: int = 0,
    ) -> None:
        self.client = client
        self.smoothing = smoothing
        self._seed = seed
        self._monitor = monitor
        self._begin = begin
        self._restored = RestoredValues(client)
        self.runner = ModelRunner(client, begin, self._restored, stacked)

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
                results[name] = _select_tables(prefers_second, *(results[m] for m in pair))
        measure_names = list(self.client.task.metric_directions())
        for model, metric in metrics.items():
            own = tables[model]
            measures = {name: own.measures[:, column] for column, name in enumerate(measure_names)}
            ids, triggers = clients.to(own.loss.device), {}
            if triggered_tables:
                triggers = {
                    "misled": triggered_tables[model].correct.sum(1),
                    "triggered": triggered_tables[model].samples.sum(1),
                }
            metric.update(
                ids,
                own.correct,
                own.samples,
                own.loss,
                **triggers,
                measures=measures,
                groups=own.groups,
                has_loss=own.has_loss,
            )

    def _compute_tables(
        self, data: ClientData, part: str, clients: Tensor, models: Iterable[str]
    ) -> dict[str, Tables]:
        """Return the results of each model for each client."""
        models = list(models)
        sizes = data.part(part).sizes[clients]
        with self._restored.watch():
            if self.client.task.runs_steps:
                return {model: self._step_tables(data, part, clients, model) for model in models}
            sums = {model: _Sums(self.client, data, sizes) for model in models}
            of_nets = [model for model in models if model != "smoothed"]
            for model, position, index, outputs in self.runner.run(data, part, clients, of_nets):
                sums[model].add(position, index, outputs)
            if self.smoothing is not None and "smoothed" in models:
                samples = self.runner.samples(data, part, clients)
                for position, index, outputs in self._run_smoothed(self.smoothing, samples):
                    sums["smoothed"].add(position, index, outputs)
            return {model: model_sums.tables for model, model_sums in sums.items()}

    def _run_smoothed(
        self, smoothing: Smoothing, samples: SampleBatches
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (positions of clients, sample ids, scores) of the votes of noisy copies."""
        data, batches = samples.data, list(samples.batches())
        if not batches:
            return

        def predict(net: nn.Module) -> Tensor:
            """Return the classes of all samples."""
            outputs = (self.runner.predict(net, data.inputs_of(index)) for _, index in batches)
            return torch.cat([scores.argmax(1) for scores in outputs])

        net, num_classes = self.client.model("global"), self.client.count_classes(data)
        scores = smoothing.score(net, predict, num_classes, self._seed)
        lengths = [len(index) for _, index in batches]
        for (position, index), part in zip(batches, scores.split(lengths), strict=True):
            yield position, index, part

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
            yield from (self._restore(self._copy_model(model)) for _ in clients)
            return
        for ids in clients.split(self.runner.max_clients):
            rows = self._begin(ids).models[model]
            for position in range(len(ids)):
                with torch.inference_mode(False), restore_models(self.client, [model]):
                    self.client.model_rows(model).copy_(rows[position])
                    net = self._restore(self._copy_model(model))
                yield net

    def _restore(self, net: nn.Module) -> nn.Module:
        """Make a copy of a model the user's net again: see :meth:`Client.restore_net`."""
        self.client.restore_net(net)
        return net

    def copy_global_model(self, update: Tensor | None = None) -> nn.Module:
        """Return a copy of the global model, in evaluation mode, with all its parameters.

        Args:
            update: A change of its trainable parameters, [numel]; no change by default.
        """
        net, row = self._copy_model("global"), self.client.row("global")
        if update is not None:
            tensors = dict(net.named_parameters())
            with torch.inference_mode(False), torch.no_grad():
                for name, change in row.layout.views(update).items():
                    tensors[name].add_(change)
        return net

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

    def own_tables(
        self, data: ClientData, part: str, clients: Tensor, model: str, rows: ModelRows
    ) -> Tables:
        """Return the results of each client's own model; with the task's metrics to monitor one.

        Args:
            data: The data of the federation.
            part: ``train``, ``val`` or ``test``.
            clients: Client ids, int64 [clients].
            model: The name of the model.
            rows: The clients' models.
        """
        sizes = data.part(part).sizes[clients]
        if self.client.task.runs_steps:
            with torch.no_grad(), evaluation_mode(self.client), self._restored.watch():
                return self._step_tables(data, part, clients, model, rows)
        sums, order = _Sums(self.client, data, sizes, self.is_monitoring), sort_by_size(sizes)
        samples = self.runner.samples(data, part, clients[order])
        with torch.no_grad(), evaluation_mode(self.client), self._restored.watch():
            for position, index, outputs in self.runner.run_personal(model, rows[order], samples):
                sums.add(order.to(position.device)[position], index, outputs)
        return sums.tables

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
        losses = ClientLosses.create(self.client, data.train.sizes[clients], data.device)

        def add(position: Tensor, _: Tensor, outputs: Tree, targets: Tree) -> None:
            """Add the losses of samples."""
            losses.add(position, outputs, targets)

        self._run_training_samples(data, clients, poison, add, losses.forget)
        return losses.means

    def group_counts(
        self, data: ClientData, clients: Tensor, poison: Mapping[int, Callable[[Batch], Batch]]
    ) -> Tensor:
        """Count each client's training samples by group and class, under the global model.

        Args:
            data: The data of the federation, with groups and classes.
            clients: Client ids, int64 [clients]; may be none.
            poison: The functions that change the data of Byzantine clients, by client id.

        Returns:
            int64 [clients, 3, groups, classes], as in ``pl_fed.functional.group_fairness``.
        """
        counts, groups = self.zero_group_counts(data, len(clients)), cast(Tensor, data.groups)

        def add(position: Tensor, index: Tensor, outputs: Tensor, targets: Tensor) -> None:
            """Add samples to the counts."""
            add_group_counts(counts, position, groups[index], targets, outputs.argmax(1))

        def forget(number: int) -> None:
            """Reset the counts of a client."""
            counts[number] = 0

        self._run_training_samples(data, clients, poison, add, forget)
        return counts

    def zero_group_counts(self, data: ClientData, num_clients: int) -> Tensor:
        """Return counts of no samples, int64 [clients, 3, groups, classes]."""
        shape = (num_clients, 3, len(data.group_names), self.client.count_classes(data))
        return torch.zeros(shape, dtype=torch.int64, device=data.device)

    def _run_training_samples(
        self,
        data: ClientData,
        clients: Tensor,
        poison: Mapping[int, Callable[[Batch], Batch]],
        add: Callable[[Tensor, Tensor, Any, Any], None],
        forget: Callable[[int], None],
    ) -> None:
        """Run the global model on the clients' training samples.

        Args:
            data: The data of the federation.
            clients: Client ids, int64 [clients].
            poison: The functions that change the data of Byzantine clients, by client id.
            add: Called with the positions of samples' clients, the samples' ids, the outputs and
                the targets.
            forget: Called with the position of a client whose earlier samples do not count: its
                poisoned ones follow.
        """
        module, samples = self.client.model("global"), self.runner.samples(data, "train", clients)
        with torch.no_grad(), evaluation_mode(self.client), self._restored.watch():
            for position, index in samples.batches():
                outputs = self.runner.predict(module, data.inputs_of(index))
                self._restored.restore()
                add(position, index, outputs, select(data.targets, index))
            for number, client in enumerate(clients.tolist()):
                if client in poison:
                    forget(number)
                    for position, index in samples.client_batches(number):
                        batch = poison[client](data.batch(index))
                        outputs = self.runner.predict(module, batch.inputs)
                        self._restored.restore()
                        add(position, index, outputs, batch.targets)

    def predict(self, data: ClientData, clients: Tensor, model: str) -> list[dict[str, Any]]:
        """Return each client's predictions on its own test samples.

        Returns:
            For each client a dict with ``client`` (id), ``sample`` (ids in the data set),
            ``target`` (not for batches of the data set's own), and the task's predictions:
            ``prediction``, and for classes ``probability`` of the predicted class. Predictions
            without classes have the shape of ``target`` if it fits.
        """
        with self._restored.watch():
            if self.client.task.runs_steps:
                return self._predict_by_steps(data, clients, model)
            pieces = list(self.runner.run(data, "test", clients, [model]))
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
        }
        targets = tree_map(Tensor.cpu, select(data.targets, index))
        if data.own_batches is None:
            table["target"] = targets
        if outputs is None:
            table["prediction"] = select(targets, slice(0, 0))
            table["probability"] = torch.empty(0)
            return table
        if isinstance(outputs, PerSample):
            table["prediction"] = PerSample(tree_map(Tensor.cpu, entry) for entry in outputs)
            return table
        table |= self.client.task.predictions(tree_map(Tensor.cpu, outputs))
        prediction = table["prediction"]
        fits = isinstance(prediction, Tensor) and isinstance(targets, Tensor)
        if fits and prediction.numel() == targets.numel():  # outputs [samples, 1]
            table["prediction"] = prediction.reshape(targets.shape)
        return table

    # Evaluation by the steps of a LightningModule

    def _evaluate_steps(
        self, data: ClientData, part: str, clients: Tensor, model: str
    ) -> StepEvaluation:
        """Return the evaluation of a model by the steps of the net."""
        task = cast(LightningTask, self.client.task)
        samples = self.runner.samples(data, part, clients)
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
        sizes = evaluation.samples.sizes
        evaluation.read_ahead(self.runner.order_clients(sizes, model, rows))
        for position in self.runner.load_clients(clients, sizes, model, rows):
            evaluation.evaluate(position, part)
        return evaluation.tables

    def _start_losses_of_steps(
        self, data: ClientData, clients: Tensor, poison: Mapping[int, Callable[[Batch], Batch]]
    ) -> Tensor:
        """Return the mean loss of the global model over each client's training data."""
        evaluation = self._evaluate_steps(data, "train", clients, "global")
        with torch.no_grad(), evaluation_mode(self.client), self._restored.watch():
            evaluation.read_ahead(range(len(clients)))
            for position, client in enumerate(clients.tolist()):
                evaluation.measure_training_loss(position, poison.get(client))
                self._restored.restore()
        return evaluation.losses

    def _predict_by_steps(
        self, data: ClientData, clients: Tensor, model: str
    ) -> list[dict[str, Any]]:
        """Return each client's predictions on its own test samples."""
        evaluation = self._evaluate_steps(data, "test", clients, model)
        sizes = evaluation.samples.sizes
        evaluation.read_ahead(self.runner.order_clients(sizes, model))
        outputs = {
            position: evaluation.predict(position)
            for position in self.runner.load_clients(clients, sizes, model)
        }
        return [
            self._predictions(data, client, outputs.get(position))
            for position, client in enumerate(clients.tolist())
        ]


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
        self._groups: Tensor | None = None
        if measures and self._classes and data.groups is not None:
            shape = (len(sizes), 3, len(data.group_names), self._classes)
            self._groups = self._count.new_zeros(shape)

    def add(self, position: Tensor, index: Tensor, outputs: Tree) -> None:
        """Add samples: their clients' positions, their ids, and the outputs for them."""
        targets = select(self._data.targets, index)
        self._losses.add(position, outputs, targets)
        if self._measures is not None:
            self._measures.add(position, outputs, targets)
        cell = position
        if self._classes:
            cell = position * self._shape[1] + targets
            predicted = outputs.argmax(1)
            self._correct.index_add_(0, cell, (predicted == targets).to(torch.int64))
            if self._groups is not None:
                groups = cast(Tensor, self._data.groups)[index]
                add_group_counts(self._groups, position, groups, targets, predicted)
        self._count.index_add_(0, cell, torch.ones_like(cell))

    @property
    def tables(self) -> Tables:
        """The results of all added samples."""
        count = self._count.view(self._shape)
        has_loss = self._losses.is_defined
        loss = (self._losses.means * count.sum(1)).masked_fill(~has_loss, torch.nan)
        no_measures = loss.new_empty(len(loss), 0)
        measures = no_measures if self._measures is None else self._measures.values
        correct = self._correct.view(self._shape)
        return Tables(correct, count, loss, has_loss, measures, self._groups)


def _select_tables(prefers_second: Tensor, first: Tables, second: Tables) -> Tables:
    """Return the results of the preferred model, by a mask of clients, bool [clients]."""

    def select_rows(rows: Tensor, others: Tensor) -> Tensor:
        """Return the rows of the preferred model."""
        mask = prefers_second.view(-1, *(1 for _ in rows.shape[1:]))
        return torch.where(mask, others, rows)

    return cast(Tables, tree_map(select_rows, first, second))
