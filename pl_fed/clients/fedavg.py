"""FedAvg: federated averaging.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson and B. Agüera y Arcas. "Communication-efficient
learning of deep networks from decentralized data". AISTATS 2017. arXiv 1602.05629.
"""

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.clients.contract import Model
from pl_fed.tasks import Task
from pl_fed.types import Batch


class FedAvg(Client):
    """FedAvg: one global model; a local step is a step on the client's own loss, F_k(w).

    The server does the other part of Algorithm 1: ``samplers.Uniform`` draws the cohort,
    ``aggregators.Mean`` averages the updates, and SGD with learning rate 1 adds the average. Any
    other server optimizer makes it FedOpt.

    Departs from the paper: by default, all clients of a cohort weigh the same. The paper's weights
    n_k / n are those of ``aggregators.Mean(weighting="samples")``.

    Args:
        net: The net that clients train: see :class:`Client`.
        optimizer: Builds the local optimizer in each round; SGD with learning rate 0.05 by default.
        lr_scheduler: Builds a learning-rate schedule from the optimizer; stepped once a round.
        local_steps: Minibatch steps in a round; or give ``local_epochs``.
        local_epochs: E, the passes over the client's data in a round; 1 if neither is given.
        criterion: Turns outputs and targets into a mean loss; cross-entropy by default.
        task: The kind of learning problem, instead of ``criterion``: see :class:`Client`.

    Example:
        >>> client = FedAvg(nn.Linear(4, 2), local_epochs=2)
        >>> client.trained, client.state_defaults()  # nothing is kept between rounds
        (('global',), {})
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
            models={"global": Model()},
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(w) on the minibatch."""
        return self.loss("global", batch)
