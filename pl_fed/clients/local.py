"""Local training: every client for itself."""

from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.types import Batch


class Local(Client):
    """No federation: each client trains a model of its own, on its own data, and sends nothing.

    It equals Ditto with λ = 0, as in the baseline "local" of Ditto's paper (Table 1): a client
    trains in the rounds in which it is drawn, and so as much as it would under Ditto.

    Args:
        net: See :class:`Client`, as for all that follows.
        **kwargs: ``optimizer``, ``lr_scheduler``, ``local_steps``, ``local_epochs``, ``criterion``.
    """

    trains = ("personal",)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(v_k) on the minibatch."""
        return self.loss(self.personal_model, batch)
