"""FedDyn: federated learning with dynamic regularization.

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough and V. Saligrama. "Federated
learning based on dynamic regularization". ICLR 2021. arXiv 2111.04263.

Algorithm 1: client k keeps λ_k, the server h, both 0 at first. From w = w^t, local steps on::

    f_k(w) − ⟨λ_k, w⟩ + α/2 ‖w − w^t‖²
    λ_k ← λ_k − α (w_k − w^t),    h ← h − α/K · Σ (w_k − w^t),    w^{t+1} = mean(w_k) − h / α

The sum and the mean are over the cohort; K is the number of ALL clients. So h is the mean of all
λ_k, inside and outside of the cohort. At a fixed point, λ_k = ∇f_k(w) and h = 0: w is a stationary
point of the mean of the f_k.

Here a client keeps the drift d_k = −λ_k / α, a sum of its changes w_k − w^t, and the server their
mean D = −h / α. Equal for one α; the authors' code keeps d_k, too.

Departs from the paper and from published code:

- ``weights="samples"`` is the authors' code: α_k is α divided by a client's samples over the mean
  of all clients. w is then a stationary point of the mean weighted by samples. The paper has one α.
- PFLlib's penalty is α/2 ‖w − w^t‖ without the square, and its server divides the sum of models by
  the expected number of clients. Here both are those of the paper.
- If cohorts vary, the step to w^{t+1} takes the expected cohort as the cohort's share of K. The
  mean D stays exact.
"""

from typing import Any, Literal

from torch import Tensor, nn

from pl_fed.arguments import check_choice, check_positive
from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound
from pl_fed.types import Batch


class FedDyn(Client):
    """FedDyn: one global model; the objective of a client has a linear and a quadratic term.

    The server takes the uniform mean D for any aggregator, and attacks on uploads do not change it.
    The server optimizer must be SGD with learning rate 1. An upload is (1 + cohort
    / K) (w_k − w^t) + D: the mean of these, added to w^t, is w^{t+1}. Aggregators that clip or
    compare norms see these rows.

    Args:
        net: The net that clients train: see :class:`Client`.
        alpha: α > 0, the strength of the pull to w^t.
        weights: The weights of the clients' losses: ``"uniform"``, or ``"samples"``, a client's
            share of all training samples. They decide the fixed point, for any weights of the
            aggregator.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If ``alpha`` is not positive and finite, or ``weights`` is unknown.

    Example:
        >>> client = FedDyn(nn.Linear(4, 2), alpha=0.1)
        >>> list(client.state_defaults()), list(client.server_state_defaults())  # d_k and D
        (['drift'], ['mean_drift'])
    """

    needs_plain_step = True

    def __init__(
        self,
        net: nn.Module,
        alpha: float = 0.1,
        weights: Literal["uniform", "samples"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, **kwargs)
        check_positive(alpha=alpha)
        check_choice(("uniform", "samples"), weights=weights)
        self.alpha = alpha
        self.weights = weights
        self.add_state("drift", self.zero_row, mean="mean_drift")

    @property
    def upload_numbers(self) -> int:
        """The number of values that a client sends: w_k; the server computes D from these."""
        return self.shared_numbers

    @property
    def exact_numbers(self) -> int:
        """The number of further values beside a compressed upload: w_k − w^t in full, for D."""
        return self.shared_numbers

    @property
    def download_numbers(self) -> int:
        """The number of values that a client receives: w^t; the clients do not need D."""
        return self.shared_numbers

    def begin(self, client: ClientRound) -> None:
        """Add ⟨d_k, w^t⟩ to the rows that the local steps read."""
        client.extra["offset"] = (client.states["drift"] @ client.broadcast.parameters)[:, None]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return f_k(w) − ⟨λ_k, w − w^t⟩ + α_k/2 ‖w − w^t‖² on the minibatch."""
        linear = self.inner_product("global", "drift") - self.read("offset")[0]
        pull = linear + self.squared_distance("global", to="broadcast") / 2
        return self.loss("global", batch) + self._strength(self.read("samples")[0]) * pull

    def _strength(self, samples: Tensor) -> Tensor | float:
        """Return α_k of a client with so many training samples."""
        if self.weights == "uniform":
            return self.alpha
        mean_samples = self.population.samples / self.population.clients
        return self.alpha * mean_samples / samples.clamp(min=1)

    def end_round(self, client: ClientRound) -> Tensor:
        """Add w_k − w^t to d_k, and upload the client's part of the step to w^{t+1}."""
        change = client.models["global"].parameters - client.broadcast.parameters
        client.states["drift"] = client.states["drift"] + change
        return (1 + self.population.share) * change + client.server_states["mean_drift"]
