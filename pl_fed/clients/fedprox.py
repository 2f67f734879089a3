"""FedProx: federated averaging with a proximal term in the local problems.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar and V. Smith. "Federated optimization in
heterogeneous networks". MLSys 2020. arXiv 1812.06127.

In round t a client minimises h_k(w; w^t) = F_k(w) + μ/2 ‖w − w^t‖² inexactly (equation 2,
Algorithm 2); the server averages, as in FedAvg. The paper draws clients in proportion to their
samples and takes the uniform mean: ``samplers.BySize`` with ``aggregators.Mean``.

In the paper, slow clients do less work: ``federation.systems`` with the policy ``partial`` gives
each client the steps that fit into a deadline. Without it, all clients do the work of the config.
"""

from typing import Any

from torch import Tensor, nn

from pl_fed.arguments import check_nonnegative
from pl_fed.clients.base import Client
from pl_fed.clients.contract import Model
from pl_fed.types import Batch


class FedProx(Client):
    """FedProx: FedAvg with a proximal term; μ = 0 is FedAvg.

    Args:
        net: The net that clients train: see :class:`Client`.
        mu: μ ≥ 0; the paper takes the best of 0.001, 0.01, 0.1 and 1.
        local_epochs: E, the passes over the client's data in a round; 1 if neither is given.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If ``mu`` is negative or infinite.

    Example:
        >>> client = FedProx(nn.Linear(4, 2), mu=0.1, local_epochs=5)
        >>> client.trained, client.mu
        (('global',), 0.1)
    """

    def __init__(self, net: nn.Module, mu: float = 0.01, **kwargs: Any) -> None:
        super().__init__(net, models={"global": Model()}, **kwargs)
        check_nonnegative(mu=mu)
        self.mu = mu

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(w) + μ/2 ‖w − w^t‖² on the minibatch."""
        return self.loss("global", batch) + self.mu / 2 * self.squared_distance("global")
