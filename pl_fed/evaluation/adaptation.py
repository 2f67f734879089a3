"""The adaptation of personal models: local training before each evaluation, without a state."""

from collections.abc import Callable

from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.contract import Objective
from pl_fed.evaluation.objective_training import ObjectiveTraining, Poison
from pl_fed.random import key


class Adaptation(ObjectiveTraining):
    """Adaptation: trains personal models by :attr:`Client.adaptation` before an evaluation.

    It uses the clients' training data, and the same minibatches before every evaluation. Therefore
    adapted models depend on the seed and the global model only, also after a resume.

    Args:
        client: The algorithm.
        objective: The adaptation's objective; it trains the model ``personal`` only.
        seed: The seed of the federation.
        poison: Returns the functions that change the data of clients, for client ids and a round.
        augment: Applied to the inputs of each minibatch.
        leaves_out: Whether a client that raises an exception is evaluated without an adaptation;
            otherwise the exception ends the run.

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
        leaves_out: bool = False,
    ) -> None:
        if objective.trained != ("personal",):
            raise ValueError(
                f"Expected `adaptation` of {type(client).__name__} to train the model personal"
                f" alone but got {', '.join(objective.trained) or 'none'}."
            )
        place = "the adaptation before an evaluation, {clients}"
        seed = key(seed, "adaptation")
        super().__init__(client, objective, seed, poison, augment, place, leaves_out)
