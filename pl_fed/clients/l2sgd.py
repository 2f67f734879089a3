"""L2SGD: personal models with a pull to their mean, once a round.

F. Hanzely and P. Richtárik. "Federated learning of a mixture of global and local models". 2020.
arXiv 2002.05516.

The objective (2): min over x_1, ..., x_n of 1/n Σ f_i(x_i) + λ/(2n) Σ ‖x_i − x̄‖², x̄ their mean.
Algorithm 1 (L2GD) takes, with probability 1 − p, a step on all f_i. With probability p it takes a
step on the penalty, the only step that communicates. With the step size α::

    x_i ← x_i − η ∇f_i(x_i),  η = α / (n (1 − p))    or    x_i ← (1 − β) x_i + β x̄,  β = αλ / (np)

Here a round is a step on the penalty and the steps on f_i up to the next one. Their expected number
is (1 − p) / p, so with K local steps β = min(ηλK, 1).

Departs from the paper:

- K is fixed, not random.
- The gradients are those of minibatches, without the control variates of L2SGD+.
- Only the cohort moves; in the paper all clients do. As in the paper, x̄ is the mean of the current
  models of all clients.
"""

from typing import Any

from torch import Tensor, nn

from pl_fed.arguments import check_nonnegative
from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Model
from pl_fed.data.client_data import ClientData
from pl_fed.types import Batch, Population


class L2SGD(Client):
    """L2SGD: a personal model for each client; the global model is their mean over all clients.

    A client uploads its change of this mean. With the defaults, ``aggregators.Mean`` and a server
    learning rate of 1, the global model is the mean of all clients' personal models after each
    round. With partial participation, an attack that sends a model counts clients / cohort times
    as much as a client's model does in this mean.

    Args:
        net: The net that clients train: see :class:`Client`.
        lam: λ ≥ 0: 0 trains local models; 1 / (ηK) or more begins each round at the mean.
        optimizer: Builds the local optimizer in each round, with learning rate η; SGD with 0.05 by
            default.
        local_steps: K, the minibatch steps in a round; or give ``local_epochs``.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If ``lam`` is negative or infinite.

    Example:
        >>> client = L2SGD(nn.Linear(4, 2), lam=0.5, local_steps=10)
        >>> client.trained, client.evaluated, client.mean_of
        (('personal',), ('global', 'personal'), 'clients')
    """

    mean_of = "clients"

    def __init__(self, net: nn.Module, lam: float = 1.0, **kwargs: Any) -> None:
        models = {"global": Model(trained=False), "personal": Model()}
        super().__init__(net, models=models, **kwargs)
        check_nonnegative(lam=lam)
        self.lam = lam

    def check(self, data: ClientData, population: Population) -> None:
        """Refuse a local optimizer with several learning rates."""
        self.refuse_mixed_options("the step on the penalty depends on η", "lr")

    def begin(self, client: ClientRound) -> None:
        """Take the step on the penalty, before a round: x_i ← (1 − β) x_i + β x̄."""
        if not client.steps:  # an evaluation
            return
        own = client.models["personal"].parameters
        beta = (self.lam * client.lr["personal"] * client.steps["personal"]).clamp(max=1)
        client.extra["before"] = own
        client.models["personal"].parameters = own + beta * (client.broadcast.parameters - own)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return f_i(x_i) on the minibatch."""
        return self.loss("personal", batch)

    def end_round(self, client: ClientRound) -> Tensor:
        """Upload the client's change of the mean over all clients."""
        own, before = client.models["personal"].parameters, client.extra["before"]
        return self.upload_change(own, before, client.broadcast.parameters)
