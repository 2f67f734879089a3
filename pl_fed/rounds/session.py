"""The parts of a federation after its setup with an algorithm and data."""

from dataclasses import dataclass

from pl_fed.clients.base import Client
from pl_fed.data.module import FederatedData
from pl_fed.rounds.client_states import ClientStates
from pl_fed.rounds.federated_evaluation import FederatedEvaluation
from pl_fed.rounds.round import RoundRunner


@dataclass(frozen=True)
class Session:
    """Session: the parts of a federation after its setup with an algorithm and data.

    Attributes:
        client: The algorithm.
        datamodule: The data of the federation.
        states: The clients' data and states.
        evaluation: Computes metrics and predictions.
        rounds: Runs the rounds.
    """

    client: Client
    datamodule: FederatedData
    states: ClientStates
    evaluation: FederatedEvaluation
    rounds: RoundRunner
