"""Ditto as the code of FLAME's authors runs it for their Table III."""

from typing import Any

from torch import Tensor, nn

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

    trains = ("personal", "personal_alone")

    def __init__(
        self, net: nn.Module, lam: float = 1.0, global_lr: float = 0.1, **kwargs: Any
    ) -> None:
        super().__init__(net, lam, **kwargs)
        self.global_lr = global_lr

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(v) + λ/2 ‖v − w‖² and the copy's loss on the minibatch."""
        alone = self.loss(self.model("personal_alone"), batch)
        return self.pulled_loss(batch, {"personal": self.lam}) + alone

    def work(self, model: str) -> LocalWork:
        """Return a pass for v, and one step for the copy."""
        return LocalWork(1) if model == "personal_alone" else self.local_work

    def group_options(self, model: str) -> dict[str, Any]:
        """Give the copy its learning rate."""
        return {"lr": self.global_lr} if model == "personal_alone" else {}

    def end_round(self, rows: dict[str, Tensor]) -> Tensor:
        """Send the copy."""
        return rows["personal_alone"] - rows["broadcast"]

    def evaluates(self) -> tuple[str, ...]:
        """Return the global model and the personal one."""
        return ("global", "personal")
