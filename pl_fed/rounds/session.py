"""A federation that is set up with an algorithm and data."""

from dataclasses import dataclass

from pl_fed.clients.base import Client
from pl_fed.data.module import FederatedData
from pl_fed.rounds.client_states import ClientStates
from pl_fed.rounds.federated_evaluation import FederatedEvaluation
from pl_fed.rounds.round import RoundRunner


@dataclass(frozen=True)
class Session:
    """A federation that is set up with an algorithm and data.

    Attributes:
        client: The algorithm.
        datamodule: The data.
        states: The clients' data and states.
        evaluation: Metrics and predictions.
        rounds: Runs the rounds.
    """

    client: Client
    datamodule: FederatedData
    states: ClientStates
    evaluation: FederatedEvaluation
    rounds: RoundRunner
