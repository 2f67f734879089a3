"""The preparation of a round: local training between ``begin`` and the local steps."""

from torch import Tensor

from pl_fed.clients.round_rules import call_hook, read_preparation_steps
from pl_fed.devices import numbers_on
from pl_fed.engine.base import Chunk
from pl_fed.engine.choice import EngineChoice
from pl_fed.evaluation.objective_training import ObjectiveTraining, Poison
from pl_fed.random import key
from pl_fed.rounds.client_states import ClientStates


class Preparation:
    """Preparation: trains models by :attr:`Client.preparation` before the local steps of a round.

    It uses the clients' training data, as the round does: Byzantine clients train on poisoned data.
    The order of the samples is another one than that of the local steps.

    Args:
        states: The data of the federation.
        engine: The engine of the rounds.
        seed: The seed of the federation.
        poison: Returns the functions that change the data of clients, for client ids and a round.

    Raises:
        ValueError: If the objective trains the global model, or a model that is not declared.
    """

    def __init__(
        self,
        states: ClientStates,
        engine: EngineChoice,
        seed: int,
        poison: Poison,
    ) -> None:
        client = states.client
        self.states = states
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
            states.rule,
            states.settings.local,
            engine,
            key(seed, "preparation"),
            poison,
            states.augment,
            place="the preparation of round {round}, {clients}",
        )

    def plan_steps(self, clients: Tensor) -> dict[str, Tensor]:
        """Return the planned numbers of steps, by prepared model, int64 [clients, 1] each.

        Args:
            clients: Client ids, int64 [clients].
        """
        if self._training is None:
            return {}
        row = self.states.client.row("global").data
        sizes = self.states.data.train.sizes[clients].tolist()
        steps = self._training.objective.count_steps(self.states.rule, sizes)
        return {name: numbers_on(row, counts)[:, None] for name, counts in steps.items()}

    def run(self, chunk: Chunk) -> None:
        """Train the prepared models of a chunk, and let the algorithm use them.

        Args:
            chunk: The clients before their local steps.
        """
        if self._training is None:
            return
        start, round, data = chunk.round, chunk.batches.round, self.states.data
        sizes = data.train.sizes[chunk.clients].tolist()
        steps = {
            name: [
                count if self.states.rule.batches_per_pass(size) else 0
                for count, size in zip(read_preparation_steps(start, name), sizes)
            ]
            for name in self._training.objective.trained
        }
        self._training.run(data, chunk.clients, start, round, steps)
        call_hook("end_preparation", self.states.client.end_preparation, start)
