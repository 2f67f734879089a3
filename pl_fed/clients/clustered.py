"""The base of algorithms with several global models, of which a client trains one in a round."""

from abc import abstractmethod
from typing import Any

from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Model, ModelRows
from pl_fed.types import Batch


class Clustered(Client):
    """Clustered: several global models (centers); each client trains and evaluates one of them.

    A subclass defines :meth:`draw_centers` and :meth:`choose_centers`.

    Args:
        net: The net that clients train: see :class:`Client`.
        centers: The number of centers, at least 2.
        needs_losses: Whether the choice reads ``client.center_losses``: see
            :meth:`Client.add_centers`.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If there are fewer than two centers, or the net has running statistics, which
            the centers would share.
    """

    def __init__(self, net: nn.Module, centers: int, needs_losses: bool, **kwargs: Any) -> None:
        super().__init__(net, models={"personal": Model(kept=False)}, **kwargs)
        self.refuse_running_statistics(f"the models of {type(self).__name__} would share them")
        self.add_centers(centers, self.draw_centers, needs_losses)

    @abstractmethod
    def draw_centers(self) -> Tensor:
        """Return the first centers, [centers, numel]."""

    @abstractmethod
    def choose_centers(self, client: ClientRound) -> Tensor:
        """Return the center of each client in a round or an evaluation, int64 [clients]."""

    def begin(self, client: ClientRound) -> None:
        """Begin with the client's center."""
        client.group = self.choose_centers(client)
        nothing = client.models["personal"].statistics
        client.models["personal"] = ModelRows(self.centers_of(client)[client.group], nothing)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k of the client's center on the minibatch."""
        return self.loss("personal", batch)

    def end_round(self, client: ClientRound) -> Tensor:
        """Upload the change of the client's center."""
        return client.models["personal"].parameters - self.centers_of(client)[client.group]

    @property
    def shared_numbers(self) -> int:
        """The number of values of one model that cross the network."""
        return len(self.row("global").data)

    @property
    def upload_numbers(self) -> int:
        """The number of values that a client sends in a round: the change of one model."""
        return self.shared_numbers

    @property
    def download_numbers(self) -> int:
        """The number of values that a client receives in a round: one model."""
        return self.shared_numbers
