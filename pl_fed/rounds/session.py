"""The parts of a federation after its setup with an algorithm and data."""

from dataclasses import dataclass

from pl_fed.clients.base import Client
from pl_fed.data.central import CENTRAL
from pl_fed.data.module import FederatedData
from pl_fed.rounds.central_evaluation import CentralEvaluation
from pl_fed.rounds.client_states import ClientStates
from pl_fed.rounds.federated_evaluation import FederatedEvaluation
from pl_fed.rounds.held_out_clients import HeldOutClients
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
        central: Measures the global model on the server's samples; ``None`` without any.
        held_out: Evaluates the held-out clients; ``None`` if all clients train.
    """

    client: Client
    datamodule: FederatedData
    states: ClientStates
    evaluation: FederatedEvaluation
    rounds: RoundRunner
    central: CentralEvaluation | None = None
    held_out: HeldOutClients | None = None

    @property
    def trains_held_out(self) -> bool:
        """Whether evaluations train personal models of held-out clients in local rounds."""
        return self.held_out is not None and self.held_out.trains

    def list_validated(self) -> list[str]:
        """Return the names of the metrics that a validation logs; none without samples."""
        names = [] if self.central is None else self.central.names("val")
        held_out = self.held_out
        return [
            *self.evaluation.validated_names(),
            *(() if held_out is None else held_out.evaluation.validated_names("val/held_out")),
            *(f"val/{CENTRAL}/{name}" for name in names),
        ]

    def list_public(self) -> list[str]:
        """Return the names of the validation metrics that no client's samples change directly."""
        if self.central is None or not self.central.is_own("val"):
            return []
        return [f"val/{CENTRAL}/{name}" for name in self.central.names("val")]
