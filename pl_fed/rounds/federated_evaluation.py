"""The evaluation of a federation: metrics and predictions of the clients' models."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pl_fed.clients.contract import ClientRound
from pl_fed.data.batches import BatchRule
from pl_fed.engine import EngineChoice
from pl_fed.evaluation.adaptation import Adaptation
from pl_fed.evaluation.evaluator import Evaluator
from pl_fed.evaluation.monitor import Monitor, directions
from pl_fed.metrics import ClientMetrics
from pl_fed.rounds.byzantine_clients import ByzantineClients
from pl_fed.rounds.client_states import ClientStates
from pl_fed.rounds.settings import RunSettings

ModelSelection = Literal["validation", "test"] | None


class FederatedEvaluation:
    """Evaluates the global model and the clients' own models on the clients' data.

    Args:
        states: The clients' data and states.
        engine: Runs the local steps of an adaptation, where the algorithm has one.
        byzantine_clients: The Byzantine clients, who are in no metric.
        settings: The trainer's settings.
        batch_rule: How samples become minibatches of an adaptation.
        adaptation: Trains personal models before they are evaluated; or ``None``.
        model_selection: By which data a client's hybrid model is chosen: see
            :class:`pl_fed.Federation`.
        monitor: The metric by which it is chosen; ``None`` for the accuracy, or the task's first.
        before: The evaluation that this one follows, of the same clients, whose results stay
            readable; or ``None``.
    """

    def __init__(
        self,
        states: ClientStates,
        engine: EngineChoice,
        byzantine_clients: ByzantineClients,
        settings: RunSettings,
        batch_rule: BatchRule,
        adaptation: Adaptation | None,
        model_selection: ModelSelection,
        monitor: str | None = None,
        before: "FederatedEvaluation | None" = None,
    ) -> None:
        self.states = states
        self.client = states.client
        self.engine = engine
        self.byzantine_clients = byzantine_clients
        self.settings = settings
        self.batch_rule = batch_rule
        self.adaptation = adaptation
        self.model_selection = model_selection
        stacked = None if before is None else before.evaluator.stacked
        self.evaluator: Evaluator = Evaluator(self.client, self._begin, stacked, monitor)
        self._metrics: dict[str, dict[str, ClientMetrics]] = {}
        if before is not None:
            self._metrics = before._metrics

    def metrics(self, part: str) -> Mapping[str, ClientMetrics]:
        """Return the metrics of ``"val"`` or ``"test"``, by model.

        They hold the last evaluation's results, also for each client
        (:meth:`~pl_fed.metrics.ClientMetrics.per_client`), until the next one begins.
        """
        if part not in self._metrics:
            data, benign = self.states.loaded, ~self.byzantine_clients.is_byzantine
            classes = self.client.classes_of(data)
            with torch.inference_mode(False):
                self._metrics[part] = {
                    model: ClientMetrics(
                        data.num_clients,
                        classes,
                        benign,
                        self.byzantine_clients.triggers,
                        directions(self.client.task),
                    )
                    for model in (*self.client.evaluated, *self._hybrid(part))
                }
        return self._metrics[part]

    def validated_names(self) -> list[str]:
        """Return the names that a validation logs; none without validation data."""
        if not int(self.states.loaded.val.sizes.sum()):
            return []
        return [
            f"val/{model}/{name}"
            for model, metrics in self.metrics("val").items()
            for name in metrics.names
        ]

    @property
    def monitor(self) -> Monitor:
        """The metric by which models are chosen."""
        return self.evaluator.monitor(self.states.loaded)

    def _hybrid(self, part: str) -> dict[str, str]:
        """Return the part of the data by which hybrid models are chosen, by their name."""
        models, data = self.client.evaluated, self.states.loaded
        if len(models) < 2 or "global" not in models:
            return {}
        if self.model_selection == "validation" and int(data.val.sizes.sum()):
            return {"hybrid": "val"}
        if self.model_selection == "test" and part == "test":
            return {"hybrid_by_test_data": "test"}
        return {}

    def evaluate(self, part: str, clients: Tensor) -> None:
        """Add clients to the metrics of a part of the data, for each evaluated model.

        Each process adds the clients whose home it is.
        """
        clients = clients[self.states.processes.at_home(clients)]
        self.states.store.prefetch(clients)
        metrics, data = self.metrics(part), self.states.data
        for metric in metrics.values():
            metric.to(data.device)
            metric.benign.copy_(~self.byzantine_clients.is_byzantine)
        triggered = self.states.shown(part, self.byzantine_clients.attack)
        with self.settings.autocast():
            self.evaluator.evaluate(data, part, clients, metrics, self._hybrid(part), triggered)

    def _begin(self, clients: Tensor) -> ClientRound:
        """Begin an evaluation of some clients, whose personal models may be adapted first."""
        if self.adaptation is None:
            return self.states.begin(clients)
        with torch.inference_mode(False):
            start = self.states.begin(clients)
            self.adaptation.run(
                self.states.data, clients, start, self.batch_rule, self.engine, self.settings.local
            )
        return start

    def predict(self, clients: Tensor) -> list[dict[str, Any]]:
        """Return each client's predictions on its test data, by the last evaluated model."""
        processes = self.states.processes
        home = clients[processes.at_home(clients)]
        with self.settings.autocast():
            tables = self.evaluator.predict(self.states.data, home, self.client.evaluated[-1])
        if processes.size == 1:
            return tables
        by_client = {
            table["client"]: table for process in processes.everyones(tables) for table in process
        }
        return [by_client[client] for client in clients.tolist()]

    def models_of(self, clients: Tensor, model: str | None) -> Iterator[nn.Module]:
        """Yield each client's model: see :meth:`pl_fed.Federation.models_of`."""
        return self.evaluator.models(clients, model or self.client.evaluated[-1])
