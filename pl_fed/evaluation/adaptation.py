"""The adaptation of personal models: local training before each evaluation, without a state."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Objective
from pl_fed.clients.model_guard import ModelGuard
from pl_fed.data.batches import Batches, BatchRule
from pl_fed.data.client_data import ClientData
from pl_fed.engine.base import Chunk, LocalSettings
from pl_fed.engine.choice import EngineChoice, Workload
from pl_fed.random import key
from pl_fed.types import Batch

Poison = Callable[[Tensor, int], Mapping[int, Callable[[Batch], Batch]]]


class Adaptation:
    """Adaptation: trains personal models by :attr:`Client.adaptation` before an evaluation.

    It uses the clients' training data, and the same minibatches before every evaluation. Therefore
    adapted models depend on the seed and the global model only, also after a resume.

    Args:
        client: The algorithm.
        objective: The adaptation's objective; it trains the model ``personal`` only.
        seed: The seed of the federation.
        poison: Returns the functions that change the data of clients, for client ids and a round.
        augment: Applied to the inputs of each minibatch.

    Raises:
        ValueError: If the objective trains another model.
    """

    def __init__(
        self,
        client: Client,
        objective: Objective,
        seed: int,
        poison: Poison,
        augment: Callable[[Tensor], Tensor] | None,
    ) -> None:
        if objective.trained != ("personal",):
            raise ValueError(
                f"Expected `adaptation` of {type(client).__name__} to train the model personal"
                f" alone but got {', '.join(objective.trained) or 'none'}."
            )
        self.client = client
        self.objective = objective
        self.seed = key(seed, "adaptation")
        self.poison = poison
        self.augment = augment
        self._engine: EngineChoice | None = None
        self._device: torch.device | None = None  # the device of the engine

    def run(
        self,
        data: ClientData,
        clients: Tensor,
        start: ClientRound,
        rule: BatchRule,
        round_engine: EngineChoice,
        settings: LocalSettings,
    ) -> None:
        """Replace the personal models of clients by adapted models.

        Args:
            data: The data of the federation.
            clients: Client ids, int64 [clients].
            start: The clients at the start of an evaluation; their personal models are replaced.
            rule: How samples become minibatches.
            round_engine: The engine of the rounds.
            settings: Precision, gradient clipping and accumulation of the local steps.
        """
        if not len(clients) or rule.limit == 0:  # no evaluated client has data, or no steps
            return
        if not self.objective.accumulates:
            settings = replace(settings, batches_per_step=1)
        training = self.client.training
        parameters = {"personal": list(self.client.row("personal").tensors.values())}
        optimizer = self.objective.build_optimizer(parameters)
        personal = start.models["personal"]
        self.client.train()
        try:
            with torch.enable_grad(), ModelGuard(self.client, ["personal"]):

                def load_chunk(positions: Tensor) -> Chunk:
                    return self._load_chunk(data, clients[positions], start, positions, rule)

                all_positions = torch.arange(len(clients))
                workload = Workload(
                    client=self.client,
                    optimizer=optimizer,
                    cohort=all_positions,
                    load=load_chunk,
                    rounds=0,
                    seconds=math.inf,
                    steps=dict,
                    settings=settings,
                )
                engine = self._choose_engine(round_engine, workload)
                for positions in all_positions.split(engine.size or 1):
                    chunk = load_chunk(positions)
                    engine.run(self.client, optimizer, chunk)
                    personal[positions] = chunk.round.models["personal"]
        finally:
            self.client.train(training)

    def _choose_engine(self, round_engine: EngineChoice, workload: Workload) -> EngineChoice:
        """Return the engine of the rounds; before its choice, the default engine."""
        engine = round_engine.choose_for_evaluation(self.client.device)
        moved = self._device != self.client.device
        if self._engine is None or self._engine.options.name != engine.options.name or moved:
            self._device = self.client.device
            self._engine = engine
        self._engine.choose(workload)
        return self._engine

    def _load_chunk(
        self,
        data: ClientData,
        clients: Tensor,
        start: ClientRound,
        positions: Tensor,
        rule: BatchRule,
    ) -> Chunk:
        """Return a chunk of clients at the start of the adaptation.

        Args:
            data: The data of the federation.
            clients: Client ids, int64 [clients].
            start: The start of the evaluation, of all its clients.
            positions: The positions of the chunk's clients in ``start``, int64 [clients].
            rule: How samples become minibatches.
        """
        sizes = data.train.sizes[clients].tolist()
        work = self.objective.work("personal")
        steps = [rule.count(work, size) for size in sizes]
        poison = dict(self.poison(clients, 0))
        batches = Batches(data, clients, steps, rule, self.seed, 0, poison, self.augment)
        own = start.select(positions)
        place = "the adaptation before an evaluation, {clients}"
        return Chunk(clients, self.objective, batches, {"personal": steps}, own, place=place)
