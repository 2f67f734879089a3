"""Ditto: a personal model per client, pulled to the global one.

T. Li, S. Hu, A. Beirami and V. Smith. "Ditto: Fair and robust federated learning through
personalization". ICML 2021. arXiv 2012.04221.

The objective (section 3.1): min over v_k of h_k(v_k; w*) = F_k(v_k) + λ/2 ‖v_k − w*‖², where w*
minimises the global objective. Solved jointly (Algorithms 1 and 2): in round t each client of the
cohort takes r steps on F_k from w^t and sends the change, and s steps on h_k(·; w^t) from its v_k.

Departs from the paper: as in the reference code, both models take a step on the same minibatch, in
turn. The pull is to w^t, the model that the round began with, so neither update sees the other, and
the order of the steps does not matter.
"""

import math
from typing import Any

from torch import Tensor, nn

from pl_fed.clients.base import Client, check_work
from pl_fed.data.batches import LocalWork
from pl_fed.types import Batch


class Ditto(Client):
    """Ditto with the joint solver (Algorithm 1; with FedAvg for the global model: Algorithm 2).

    Args:
        net: See :class:`Client`, as for all that is not named here.
        lam: λ ≥ 0, the strength of the pull: 0 trains local models, a large one copies the global.
        personal_lr: Learning rate of v; the optimizer's own, that of w, by default.
        personal_steps: s, the minibatch steps on v in a round; as many as on w by default.
        personal_epochs: The same, counted in passes over the client's data.
        **kwargs: ``optimizer``, ``lr_scheduler``, ``local_steps`` (the paper's r),
            ``local_epochs``, ``criterion``.

    Raises:
        ValueError: If ``lam`` or ``personal_lr`` is negative or infinite, or the work below 1.
    """

    trains = ("global", "personal")

    def __init__(
        self,
        net: nn.Module,
        lam: float = 1.0,
        personal_lr: float | None = None,
        personal_steps: int | None = None,
        personal_epochs: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, **kwargs)
        for name, value in (("lam", lam), ("personal_lr", personal_lr)):
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(
                    f"Expected argument `{name}` to be at least 0, and finite, but got {value}."
                )
        check_work(personal_steps, personal_epochs, prefix="personal")
        self.lam = lam
        self.personal_lr = personal_lr
        self.personal_work = self.local_work
        if personal_steps is not None or personal_epochs is not None:
            self.personal_work = LocalWork(personal_steps, personal_epochs or 1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(w) + F_k(v) + λ/2 ‖v − w^t‖² on the minibatch."""
        global_loss = self.loss(self.global_model, batch)
        personal_loss = self.loss(self.personal_model, batch)
        return global_loss + personal_loss + self.lam / 2 * self.distance_to_broadcast()

    def work(self, model: str) -> LocalWork:
        """Return r for w, and s for v."""
        return self.personal_work if model == "personal" else self.local_work

    def group_options(self, model: str) -> dict[str, Any]:
        """Give v a learning rate of its own, if it has one."""
        if model == "personal" and self.personal_lr is not None:
            return {"lr": self.personal_lr}
        return {}
