"""The evaluation of a federation: metrics and predictions of the clients' models."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pl_fed.clients.contract import ClientRound, ModelRows
from pl_fed.devices import to_device
from pl_fed.evaluation.client_sample import ClientSample
from pl_fed.evaluation.evaluator import Evaluator
from pl_fed.evaluation.monitor import Monitor
from pl_fed.evaluation.objective_training import ObjectiveTraining
from pl_fed.evaluation.smoothing import Smoothing
from pl_fed.functional.client_figures import ClientFigure
from pl_fed.metrics import ClientMetrics
from pl_fed.random import key
from pl_fed.rounds.byzantine_clients import ByzantineClients
from pl_fed.rounds.centers import Centers
from pl_fed.rounds.client_states import ClientStates

ModelSelection = Literal["validation", "test"] | None
UntrainedModels = Literal["global"] | None


class FederatedEvaluation:
    """Federated evaluation: evaluates global and personal models on the clients' data.

    Args:
        states: The clients' data and states.
        byzantine_clients: The Byzantine clients; metrics leave them out.
        adaptation: Trains personal models before each evaluation; ``None`` for no adaptation.
        model_selection: The data that selects a client's hybrid model: see
            :class:`pl_fed.Federation`.
        monitor: The metric that selects it; ``None`` for the accuracy, or the task's first metric.
        untrained_models: The model that replaces untrained personal models: see
            :class:`pl_fed.Federation`.
        sample: The clients that validations evaluate; ``None`` for all clients.
        figures: Further statistics over clients.
        smoothing: The noisy copies of the global model whose votes a test measures; ``None`` for no
            votes.
        seed: The seed of their noise.
        before: The previous evaluation of the same clients, or ``None``. Its results stay readable.
    """

    def __init__(
        self,
        states: ClientStates,
        byzantine_clients: ByzantineClients,
        adaptation: ObjectiveTraining | None,
        model_selection: ModelSelection,
        monitor: str | None = None,
        untrained_models: UntrainedModels = None,
        sample: ClientSample | None = None,
        figures: Sequence[ClientFigure] = (),
        smoothing: Smoothing | None = None,
        seed: int = 0,
        before: "FederatedEvaluation | None" = None,
    ) -> None:
        self.states = states
        self.client = states.client
        self.byzantine_clients = byzantine_clients
        self.settings = states.settings
        self.adaptation = adaptation
        self.model_selection = model_selection
        self.untrained_models = untrained_models
        self.sample = sample
        self.figures = tuple(figures)
        stacked = None if before is None else before.evaluator.runner.stacked
        self.evaluator: Evaluator = Evaluator(
            self.client, self._begin, stacked, monitor, smoothing, key(seed, "smoothing")
        )
        self.centers = Centers(states, self.evaluator)
        self._metrics: dict[str, dict[str, ClientMetrics]] = {}
        if before is not None:
            self._metrics = before._metrics

    def metrics(self, part: str) -> Mapping[str, ClientMetrics]:
        """Return the metrics of ``"val"`` or ``"test"``, by model.

        Until the next evaluation they contain the results of the last one, also for each client
        (:meth:`~pl_fed.metrics.ClientMetrics.per_client`).
        """
        if part not in self._metrics:
            data, benign = self.states.loaded, ~self.byzantine_clients.is_byzantine
            sample = self._sample_of(part)
            classes = self.client.count_classes(data)
            groups = 0 if self.client.task.runs_steps else len(data.group_names)
            with torch.inference_mode(False):
                self._metrics[part] = {
                    model: ClientMetrics(
                        data.num_clients,
                        classes,
                        benign,
                        self.byzantine_clients.triggers,
                        self.client.task.metric_directions(),
                        ~self.states.is_untrained,
                        self.client.task.has_loss(part),
                        None if sample is None else sample.share,
                        self.figures,
                        groups,
                    )
                    for model in self._list_models(part)
                }
        return self._metrics[part]

    def _list_models(self, part: str) -> list[str]:
        """Return the names of the models of an evaluation; the votes follow the global model."""
        models = [*self.client.evaluated, *self._hybrid_models(part)]
        if part == "test" and self.evaluator.smoothing is not None:
            models.insert(models.index("global") + 1, "smoothed")
        return models

    def validated_names(self, prefix: str = "val") -> list[str]:
        """Return the names of the metrics that a validation logs; none without validation data."""
        if not int(self.states.loaded.val.sizes.sum()):
            return []
        return [
            f"{prefix}/{model}/{name}"
            for model, metrics in self.metrics("val").items()
            for name in metrics.names
        ]

    @property
    def monitor(self) -> Monitor:
        """The metric that selects models."""
        return self.evaluator.monitor(self.states.loaded)

    def _hybrid_models(self, part: str) -> dict[str, str]:
        """Return the part of the data that selects each hybrid model, by the model's name."""
        models, data = self.client.evaluated, self.states.loaded
        if len(models) < 2 or "global" not in models:
            return {}
        task = self.client.task
        directions = task.metric_directions().values()
        if not task.has_loss("val") and all(higher is None for higher in directions):
            return {}  # an evaluation gives nothing by which a better model is selected
        if self.model_selection == "validation" and int(data.val.sizes.sum()):
            return {"hybrid": "val"}
        if self.model_selection == "test" and part == "test":
            return {"hybrid_by_test_data": "test"}
        return {}

    def list_evaluated_clients(self, part: str) -> Tensor:
        """Return the ids of the clients that an evaluation of a part sees, int64, in order."""
        if (sample := self._sample_of(part)) is not None:
            return sample.is_drawn.nonzero().flatten()
        return torch.arange(self.states.loaded.num_clients)

    def evaluate(self, part: str, clients: Tensor) -> None:
        """Add clients to the metrics of a part of the data, for each evaluated model.

        Each process adds the clients at home in it. A validation adds clients of its sample only.
        """
        clients = self.select_sampled(part, clients)
        clients = clients[self.states.processes.is_home(clients)]
        self.states.store.prefetch(clients)
        metrics, data = self.metrics(part), self.states.data
        example = self.client.row("global").data
        benign = to_device(~self.byzantine_clients.is_byzantine, example)
        trained = to_device(~self.states.is_untrained, example)
        for metric in metrics.values():
            metric.to(data.device)
            metric.benign.copy_(benign)
            metric.trained.copy_(trained)
        triggered = self.states.apply_trigger(part, self.byzantine_clients.attack)
        with self.settings.autocast():
            self.evaluator.evaluate(
                data, part, clients, metrics, self._hybrid_models(part), triggered
            )

    def select_sampled(self, part: str, clients: Tensor) -> Tensor:
        """Return those of some clients that an evaluation of a part sees, int64."""
        sample = self._sample_of(part)
        return clients if sample is None else clients[sample.is_drawn[clients]]

    def _sample_of(self, part: str) -> ClientSample | None:
        """Return the clients that an evaluation of a part sees; ``None`` for all clients."""
        return self.sample if part == "val" else None

    def _begin(self, clients: Tensor) -> ClientRound:
        """Begin an evaluation of clients, after the adaptation of their personal models."""
        if self.adaptation is None:
            start = self.states.begin(clients, center_losses=self.centers.measure(clients))
            if self.untrained_models == "global":
                self._replace_untrained(start)
            return start
        with torch.inference_mode(False):
            start = self.states.begin(clients)
            self.adaptation.run(self.states.data, clients, start)
        return start

    def _replace_untrained(self, start: ClientRound) -> None:
        """Replace the personal models of clients that never took part by the global model."""
        personal = self.client.evaluated[-1]
        is_untrained = self.states.is_untrained.to(start.ids.device)[start.ids]
        if personal in start.models and is_untrained.any():
            models = (start.models[personal], start.broadcast.expand(len(start)))
            start.models[personal] = ModelRows.choose(models, is_untrained.to(torch.int64))

    def predict(self, clients: Tensor) -> list[dict[str, Any]]:
        """Return the predictions of each client's last evaluated model on its test data."""
        processes = self.states.processes
        home_clients = clients[processes.is_home(clients)]
        with self.settings.autocast():
            tables = self.evaluator.predict(
                self.states.data, home_clients, self.client.evaluated[-1]
            )
        if processes.size == 1:
            return tables
        all_tables = {
            table["client"]: table
            for process_tables in processes.gather_objects(tables)
            for table in process_tables
        }
        return [all_tables[client] for client in clients.tolist()]

    def models_of(self, clients: Tensor, model: str | None) -> Iterator[nn.Module]:
        """Yield each client's model: see :meth:`pl_fed.Federation.models_of`."""
        return self.evaluator.models(clients, model or self.client.evaluated[-1])
