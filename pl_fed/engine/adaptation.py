"""Personal models that are trained before each evaluation, from the global model, and not kept."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.data.batches import Batches, BatchRule
from pl_fed.data.client_data import ClientData
from pl_fed.engine.base import Chunk
from pl_fed.engine.choice import EngineChoice, Task
from pl_fed.engine.evaluation import WorkSpace
from pl_fed.functional.random import key
from pl_fed.types import Batch

Poison = Callable[[Tensor, int], Mapping[int, Callable[[Batch], Batch]]]


class Adaptation:
    """Trains personal models by :meth:`Client.adaptation_step`, on the clients' training data.

    Its minibatches are the same before every evaluation, so that what is evaluated depends on the
    seed and on the global model only: after a resume it is the same again.

    Args:
        client: The algorithm, whose ``adaptation_work`` is given.
        seed: The seed of the federation.
        poison: What byzantine clients do to their data, for ids and a round.
        augment: Applied to the inputs of each minibatch.
    """

    def __init__(
        self,
        client: Client,
        seed: int,
        poison: Poison,
        augment: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.client = client
        self.seed = key(seed, "adaptation")
        self.poison = poison
        self.augment = augment
        self._made: Client | None = None
        self._engine: EngineChoice | None = None

    @property
    def _adapter(self) -> Client:
        """The client whose step is the adaptation's, on the device where the client is now."""
        if self._made is None or self._made.device != self.client.device:
            self._made, self._engine = self.client.adapter(), None
        return self._made

    def run(
        self,
        data: ClientData,
        clients: Tensor,
        rows: dict[str, Tensor],
        rule: BatchRule,
        like: EngineChoice,
    ) -> None:
        """Exchange the personal models of some clients for what adapting makes of them.

        Args:
            data: The data of the federation.
            clients: Ids, int64 [clients].
            rows: As they begin a round; ``personal`` and its running statistics are exchanged.
            rule: How samples become minibatches.
            like: How a round's local steps are run.
        """
        if not len(clients) or rule.limit == 0:  # nobody who is evaluated has data; or no steps
            return
        training = self.client.training
        leaves = {"personal": list(self.client.row("personal").tensors.values())}
        optimizer = self._adapter.build_optimizer(leaves)
        self._adapter.train()
        try:
            with torch.enable_grad(), WorkSpace(self.client, ["personal"]):

                def load(positions: Tensor) -> Chunk:
                    return self._chunk(data, clients[positions], rows, positions, rule)

                everyone = torch.arange(len(clients))
                engine = self._settled(
                    like, Task(self._adapter, optimizer, everyone, load, 0, math.inf, dict)
                )
                for positions in everyone.split(engine.size or 1):
                    chunk = load(positions)
                    engine.run(self._adapter, optimizer, chunk)
                    rows["personal"][positions] = chunk.rows["personal"]
                    statistics = chunk.statistics["personal"]
                    rows["personal_statistics"][positions] = statistics
        finally:
            self.client.train(training)

    def _settled(self, like: EngineChoice, task: Task) -> EngineChoice:
        """Return the engine: the one of the rounds, if it is known."""
        default = "stacked" if self.client.device.type == "cuda" else "one_by_one"
        name = like.current or (default if like.name == "auto" else like.name)
        if self._engine is None or self._engine.name != name:
            self._engine = EngineChoice(name, like.chunk_size, like.compile_mode)  # type: ignore[arg-type]
            self._engine.autocast, self._engine.clipping = like.autocast, like.clipping
        self._engine.settle(task)
        return self._engine

    def _chunk(
        self,
        data: ClientData,
        clients: Tensor,
        rows: Mapping[str, Tensor],
        positions: Tensor,
        rule: BatchRule,
    ) -> Chunk:
        sizes = data.train.sizes[clients].tolist()
        steps = [rule.count(self._adapter.work("personal"), size) for size in sizes]
        how = (rule, self.seed, 0, dict(self.poison(clients, 0)), self.augment)
        own = {name: row if row.dim() == 1 else row[positions] for name, row in rows.items()}
        statistics = {"personal": own.pop("personal_statistics")}
        batches = Batches(data, clients, steps, *how)
        return Chunk(clients, batches, {"personal": steps}, own, statistics)
