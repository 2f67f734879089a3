"""Local: local training without a federation, the baseline of Ditto's paper (Table 1).

T. Li, S. Hu, A. Beirami and V. Smith. "Ditto: Fair and robust federated learning through
personalization". ICML 2021. arXiv 2012.04221.
"""

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.clients.contract import Model
from pl_fed.tasks import Task
from pl_fed.types import Batch


class Local(Client):
    """Local: each client trains its own model on its own data, and sends nothing.

    It equals Ditto with λ = 0, the baseline "local" of Ditto's paper. A client trains only in the
    rounds of its cohorts, and therefore as much as under Ditto.

    Args:
        net: The net that clients train: see :class:`Client`.
        optimizer: Builds the local optimizer in each round; SGD with learning rate 0.05 by default.
        lr_scheduler: Builds a learning-rate schedule from the optimizer; stepped once a round.
        local_steps: Minibatch steps in a round; or give ``local_epochs``.
        local_epochs: Passes over the client's data in a round; 1 if neither is given.
        criterion: Turns outputs and targets into a mean loss; cross-entropy by default.
        task: The kind of learning problem, instead of ``criterion``: see :class:`Client`.

    Example:
        >>> client = Local(nn.Linear(4, 2), local_epochs=2)
        >>> round = client.run_begin(client.new_round(clients=3))
        >>> uploads, kept = client.run_end_round(round)
        >>> uploads, kept["personal"].shape
        (None, torch.Size([3, 10]))
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: OptimizerCallable = lambda params: torch.optim.SGD(params, lr=0.05),
        lr_scheduler: LRSchedulerCallable | None = None,
        local_steps: int | None = None,
        local_epochs: int | None = None,
        criterion: nn.Module | None = None,
        task: Task | None = None,
    ) -> None:
        super().__init__(
            net,
            optimizer,
            lr_scheduler,
            local_steps,
            local_epochs,
            criterion,
            task=task,
            models={"personal": Model()},
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(v_k) on the minibatch."""
        return self.loss("personal", batch)
