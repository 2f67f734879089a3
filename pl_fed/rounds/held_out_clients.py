"""Held-out clients: clients that never train in a round, evaluated with the server's model.

A held-out client evaluates the global model as it is. Its personal model is the one that a client
would get that arrives now and keeps it to itself:

- If the algorithm adapts personal models before each evaluation (:attr:`Client.adaptation`), the
  client adapts the global model in the same way.
- Otherwise personal models come from rounds. The client's kept models start at the global model,
  and its other states at their defaults. It takes the local steps of some rounds on its own
  training samples, by the algorithm's objective, with the optimizer's own learning rate, and
  sends nothing.

Its models and states are discarded after the evaluation. Seed, client and local round key all
draws, so that each evaluation of one global model gives the same numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.data.client_data import ClientData
from pl_fed.engine import EngineChoice
from pl_fed.evaluation.monitor import Tables
from pl_fed.random import key
from pl_fed.rounds.client_states import ClientStates, new_client_rows
from pl_fed.rounds.federated_evaluation import FederatedEvaluation
from pl_fed.rounds.local_training import LocalTraining
from pl_fed.rounds.server import Server
from pl_fed.rounds.storage import StorageOptions


class HeldOutStates(ClientStates):
    """Held-out states: the data of held-out clients, and the states that an evaluation gives them.

    The samples are those of the training clients' placed data: no tensor is placed twice.

    Args:
        training: The training clients' data and states.
        data: The held-out clients' data, as loaded.
        server: The server.
        storage: The storage options of the clients' states.
    """

    def __init__(
        self,
        training: ClientStates,
        data: ClientData,
        server: Server,
        storage: StorageOptions,
    ) -> None:
        super().__init__(
            training.client,
            data,
            server,
            training.settings,
            storage,
            training.rule,
            training.augment,
        )
        self._training = training
        self._placed: ClientData | None = None  # the data that the present parts belong to

    @property
    def data(self) -> ClientData:
        """The clients' data, on the device of the models and in their precision."""
        placed = self._training.data
        if self._data is None or self._placed is not placed:
            own = self.loaded
            train, val, test = (part.to(placed.device) for part in (own.train, own.val, own.test))
            self._data = replace(placed, train=train, val=val, test=test, owners=own.owners)
            self._placed = placed
        return self._data

    def restart(self) -> None:
        """Give every client new states: its kept models are the global model."""
        self._store = self._build_store(new_client_rows(self.client))


class HeldOutClients:
    """Held-out clients: trains personal models for them, and evaluates all their models.

    Args:
        states: Their data and states.
        evaluation: Evaluates models on their data; its Byzantine clients change the data of
            held-out clients as those of benign clients.
        training: The local training of the rounds; that of held-out clients has its engine and its
            watch over modules.
        seed: The seed of the federation.
        local_rounds: Number of local rounds of an algorithm without an adaptation, at least 1.
    """

    def __init__(
        self,
        states: HeldOutStates,
        evaluation: FederatedEvaluation,
        training: LocalTraining,
        seed: int,
        local_rounds: int,
    ) -> None:
        self.states = states
        self.evaluation = evaluation
        self.client: Client = states.client
        self.local_rounds = local_rounds
        self._round_engine = training.engine
        self._engine: EngineChoice | None = None
        self._cohort = torch.empty(0, dtype=torch.int64)
        self._build_training = partial(
            LocalTraining,
            states,
            lambda _: self._cohort,
            evaluator=evaluation.evaluator,
            byzantine_clients=evaluation.byzantine_clients,
            seed=key(seed, "held-out clients"),
            leaves_out=training.leaves_out,
            watch=training.watch,
        )

    @property
    def trains(self) -> bool:
        """Whether the algorithm's personal models come from local rounds."""
        client = self.client  # a center is not trained before it is evaluated
        is_own = set(client.evaluated) != {"global"} and not client.num_centers
        return client.adaptation is None and is_own

    def evaluate(self, part: str, clients: Tensor) -> None:
        """Add clients to the metrics of a part of the data, for each evaluated model.

        Args:
            part: ``"val"`` or ``"test"``.
            clients: Their numbers among the held-out clients, int64 [clients].
        """
        self._train(self.evaluation.select_sampled(part, clients))
        self.evaluation.evaluate(part, clients)

    def predict(self, clients: Tensor) -> list[dict[str, Any]]:
        """Return the predictions of each client's last evaluated model on its test data.

        Args:
            clients: Their numbers among the held-out clients, int64 [clients].
        """
        self._train(clients)
        return self.evaluation.predict(clients)

    def measure(self, part: str, clients: Tensor, models: Sequence[str]) -> dict[str, Tables]:
        """Return the results of models on a part of the data, for each client.

        Args:
            part: ``"train"``, ``"val"`` or ``"test"``.
            clients: Their numbers among the held-out clients, int64 [clients].
            models: The names of the models.
        """
        self._train(clients)
        return self.evaluation.evaluator.tables(self.states.data, part, clients, models)

    def models_of(self, clients: Tensor, model: str | None) -> Iterator[nn.Module]:
        """Yield each client's model: see :meth:`pl_fed.Federation.models_of`.

        Args:
            clients: Their numbers among the held-out clients, int64 [clients].
            model: The name of an evaluated model; ``None`` for the last one.
        """
        self._train(clients)
        yield from self.evaluation.models_of(clients, model)

    def _train(self, clients: Tensor) -> None:
        """Give clients new states, and train them in local rounds; uploads are thrown away."""
        client = self.client
        self.states.restart()
        if not self.trains or not len(clients):
            return
        self._cohort = clients
        was_training, schedule = client.training, client.local_schedule
        client.train()
        client.local_schedule = None  # a fit alone builds one
        try:
            with torch.inference_mode(False), torch.enable_grad():
                device = client.device
                self._engine = self._round_engine.choose_for_evaluation(device, self._engine)
                training = self._build_training(engine=self._engine)
                optimizer = client.objective.build_optimizer(client.trained_parameters)
                for round in range(self.local_rounds):
                    training.run(round, optimizer).store_states(self.states.store)
        finally:
            client.train(was_training)
            client.local_schedule = schedule
