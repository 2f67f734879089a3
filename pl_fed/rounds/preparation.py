"""The preparation of a round: local training between ``begin`` and the local steps."""

from collections.abc import Callable

from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.round_rules import call_hook, read_preparation_steps
from pl_fed.data.batches import BatchRule
from pl_fed.data.client_data import ClientData
from pl_fed.devices import numbers_on
from pl_fed.engine.base import Chunk, LocalSettings
from pl_fed.engine.choice import EngineChoice
from pl_fed.evaluation.objective_training import ObjectiveTraining, Poison
from pl_fed.random import key


class Preparation:
    """Preparation: trains models by :attr:`Client.preparation` before the local steps of a round.

    It uses the clients' training data, as the round does: Byzantine clients train on poisoned data.
    The order of the samples is another one than that of the local steps.

    Args:
        client: The algorithm.
        seed: The seed of the federation.
        poison: Returns the functions that change the data of clients, for client ids and a round.
        augment: Applied to the inputs of each minibatch.

    Raises:
        ValueError: If the objective trains the global model, or a model that is not declared.
    """

    def __init__(
        self,
        client: Client,
        seed: int,
        poison: Poison,
        augment: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.client = client
        self._training: ObjectiveTraining | None = None
        if client.preparation is None:
            return
        own_models = [name for name in client.models if name != "global"]
        if not {*client.preparation.trained} <= {*own_models}:
            raise ValueError(
                f"Expected `preparation` of {type(client).__name__} to train declared models other"
                f" than global ({', '.join(own_models)}) but got"
                f" {', '.join(client.preparation.trained)}: declare them by `models=`."
            )
        self._training = ObjectiveTraining(
            client,
            client.preparation,
            key(seed, "preparation"),
            poison,
            augment,
            place="the preparation of round {round}, {clients}",
        )

    def plan_steps(
        self, data: ClientData, clients: Tensor, rule: BatchRule, like: Tensor
    ) -> dict[str, Tensor]:
        """Return the planned numbers of steps, by prepared model, int64 [clients, 1] each.

        Args:
            data: The data of the federation.
            clients: Client ids, int64 [clients].
            rule: How samples become minibatches.
            like: A tensor on the device of the numbers.
        """
        if self._training is None:
            return {}
        steps = self._training.count_steps(data, clients, rule)
        return {name: numbers_on(like, counts)[:, None] for name, counts in steps.items()}

    def run(
        self, data: ClientData, chunk: Chunk, engine: EngineChoice, settings: LocalSettings
    ) -> None:
        """Train the prepared models of a chunk, and let the algorithm use them.

        Args:
            data: The data of the federation.
            chunk: The clients before their local steps.
            engine: The engine of the rounds.
            settings: Precision, gradient clipping and accumulation of the local steps.
        """
        if self._training is None:
            return
        start, batches = chunk.round, chunk.batches
        sizes = data.train.sizes[chunk.clients].tolist()
        steps = {
            name: [
                count if batches.rule.batches_per_pass(size) else 0
                for count, size in zip(read_preparation_steps(start, name), sizes)
            ]
            for name in self._training.objective.trained
        }
        self._training.run(
            data, chunk.clients, start, batches.rule, engine, settings, batches.round, steps
        )
        call_hook("end_preparation", self.client.end_preparation, start)
