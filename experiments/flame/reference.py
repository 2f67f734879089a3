"""Ditto in the variant of the FLAME authors' code, for their Table III."""

from typing import Any

from torch import Tensor, nn

from pl_fed.clients.contract import ClientRound, Model
from pl_fed.clients.pulled import Pulled
from pl_fed.data.batches import LocalWork
from pl_fed.types import Batch


class UnsynchronizedDitto(Pulled):
    """Unsynchronized Ditto: clients never replace their copy of the global model by the broadcast.

    This differs from Ditto. Each client's copy starts from the common initial model and takes one
    step on one minibatch per round. The client uploads its copy, so w is the mean of models that
    were trained separately. The personal model is trained for one pass, with the pull towards w.

    Args:
        net: The net: see :class:`pl_fed.clients.Client`.
        lam: λ, the strength of the pull.
        global_lr: Learning rate of the copies.
        **kwargs: Further arguments of :class:`pl_fed.clients.Client`.
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
        """Return the upload: the copy minus the broadcast."""
        return client.models["personal_alone"].parameters - client.broadcast.parameters
