"""Federated averaging.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson and B. Agüera y Arcas. "Communication-efficient
learning of deep networks from decentralized data". AISTATS 2017. arXiv 1602.05629.
"""

from typing import Any

from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.clients.contract import Model
from pl_fed.types import Batch


class FedAvg(Client):
    """One global model; a client's step is a step on its own loss, F_k(w).

    The rest of Algorithm 1 is the server's: ``samplers.Uniform`` draws the cohort,
    ``aggregators.Mean`` averages the updates (``weighting: samples`` is the paper's n_k / n), and
    SGD with learning rate 1 adds the average. Any other server optimizer makes it FedOpt.

    Args:
        net: See :class:`Client`, as for all that follows.
        **kwargs: ``optimizer``, ``lr_scheduler``, ``local_steps``, ``local_epochs``, ``criterion``.
    """

    def __init__(self, net: nn.Module, **kwargs: Any) -> None:
        super().__init__(net, models={"global": Model()}, **kwargs)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(w) on the minibatch."""
        return self.loss("global", batch)
