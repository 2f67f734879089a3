"""Ditto as the code of FLAME's authors runs it for their Table III."""

from typing import Any

from torch import Tensor, nn

from pl_fed.clients.contract import ClientRound, Model
from pl_fed.clients.pulled import Pulled
from pl_fed.data.batches import LocalWork
from pl_fed.types import Batch


class UnsynchronizedDitto(Pulled):
    """Not Ditto: the clients' copies of the global model are never set to what the server sends.

    Each begins at the common start, takes one step on one minibatch in a round, and goes on from
    there in the next. What is sent is that copy, so that w is the mean of models that were trained
    alone. The personal model is pulled to w, by a pass over all data.

    Args:
        net: See :class:`pl_fed.clients.Client`.
        lam: λ, the strength of the pull.
        global_lr: The learning rate of the copies.
        **kwargs: See :class:`pl_fed.clients.Client`.
    """

    def __init__(
        self, net: nn.Module, lam: float = 1.0, global_lr: float = 0.1, **kwargs: Any
    ) -> None:
        copy = Model(evaluated=False, work=LocalWork(1), lr=global_lr)
        models = {"global": Model(trained=False), "personal": Model(), "personal_alone": copy}
        super().__init__(net, models, lam, **kwargs)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(v) + λ/2 ‖v − w‖² and the copy's loss on the minibatch."""
        alone = self.loss("personal_alone", batch)
        return self.pulled_loss(batch, {"personal": self.lam}) + alone

    def end_round(self, client: ClientRound) -> Tensor:
        """Send the copy."""
        return client.models["personal_alone"].parameters - client.broadcast.parameters
