"""Local training: every client for itself."""

from typing import Any

from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.clients.contract import Model
from pl_fed.types import Batch


class Local(Client):
    """No federation: each client trains a model of its own, on its own data, and sends nothing.

    It equals Ditto with λ = 0, as in the baseline "local" of Ditto's paper (Table 1): a client
    trains in the rounds in which it is drawn, and so as much as it would under Ditto.

    Args:
        net: See :class:`Client`, as for all that follows.
        **kwargs: ``optimizer``, ``lr_scheduler``, ``local_steps``, ``local_epochs``, ``criterion``.
    """

    def __init__(self, net: nn.Module, **kwargs: Any) -> None:
        super().__init__(net, models={"personal": Model()}, **kwargs)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(v_k) on the minibatch."""
        return self.loss("personal", batch)
