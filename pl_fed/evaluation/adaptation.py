"""Personal models that are trained before each evaluation, from the global model, and not kept."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Objective
from pl_fed.clients.model_guard import ModelGuard
from pl_fed.data.batches import Batches, BatchRule
from pl_fed.data.client_data import ClientData
from pl_fed.engine.base import Chunk, LocalSettings
from pl_fed.engine.choice import EngineChoice, Workload, default_engine
from pl_fed.random import key
from pl_fed.types import Batch

Poison = Callable[[Tensor, int], Mapping[int, Callable[[Batch], Batch]]]


class Adaptation:
    """Trains personal models by :attr:`Client.adaptation`, on the clients' training data.

    Its minibatches are the same before every evaluation, so that what is evaluated depends on the
    seed and on the global model only: after a resume it is the same again.

    Args:
        client: The algorithm.
        objective: Its adaptation, which trains the model ``personal``.
        seed: The seed of the federation.
        poison: What byzantine clients do to their data, for ids and a round.
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
        self._device: torch.device | None = None  # where the engine was made

    def run(
        self,
        data: ClientData,
        clients: Tensor,
        start: ClientRound,
        rule: BatchRule,
        like: EngineChoice,
        settings: LocalSettings,
    ) -> None:
        """Replace the personal models of some clients by the adapted ones.

        Args:
            data: The data of the federation.
            clients: Ids, int64 [clients].
            start: The clients' round as an evaluation begins it; its personal models are replaced.
            rule: How samples become minibatches.
            like: How a round's local steps are run.
            settings: How every local step is computed.
        """
        if not len(clients) or rule.limit == 0:  # nobody who is evaluated has data; or no steps
            return
        training = self.client.training
        parameters = {"personal": list(self.client.row("personal").tensors.values())}
        optimizer = self.objective.build_optimizer(parameters)
        personal = start.models["personal"]
        self.client.train()
        try:
            with torch.enable_grad(), ModelGuard(self.client, ["personal"]):

                def load(positions: Tensor) -> Chunk:
                    return self._chunk(data, clients[positions], start, positions, rule)

                all_positions = torch.arange(len(clients))
                work = Workload(
                    client=self.client,
                    optimizer=optimizer,
                    cohort=all_positions,
                    load=load,
                    rounds=0,
                    seconds=math.inf,
                    steps=dict,
                    settings=settings,
                )
                engine = self._choose_engine(like, work)
                for positions in all_positions.split(engine.size or 1):
                    chunk = load(positions)
                    engine.run(self.client, optimizer, chunk)
                    personal[positions] = chunk.round.models["personal"]
        finally:
            self.client.train(training)

    def _choose_engine(self, like: EngineChoice, work: Workload) -> EngineChoice:
        """Return the engine: that of the rounds, if one is chosen already."""
        default = default_engine(self.client.device)
        name: Any = like.current or (default if like.options.name == "auto" else like.options.name)
        moved = self._device != self.client.device
        if self._engine is None or self._engine.options.name != name or moved:
            self._device = self.client.device
            self._engine = EngineChoice(replace(like.options, name=name))
        self._engine.settle(work)
        return self._engine

    def _chunk(
        self,
        data: ClientData,
        clients: Tensor,
        start: ClientRound,
        positions: Tensor,
        rule: BatchRule,
    ) -> Chunk:
        sizes = data.train.sizes[clients].tolist()
        work = self.objective.work("personal")
        steps = [rule.count(work, size) for size in sizes]
        poison = dict(self.poison(clients, 0))
        batches = Batches(data, clients, steps, rule, self.seed, 0, poison, self.augment)
        own = start.select(positions)
        place = "the adaptation before an evaluation, {clients}"
        return Chunk(clients, self.objective, batches, {"personal": steps}, own, place=place)
