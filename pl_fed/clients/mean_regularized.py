"""Mean-regularised multi-task learning: personal models with a pull to their mean.

T. Evgeniou and M. Pontil. "Regularized multi-task learning". KDD 2004. Ditto's paper (arXiv
2012.04221, section 2) compares itself with the federated form. In round t::

    θ_i ← local steps on f_i(θ_i) + λ/2 ‖θ_i − w^t‖², from the client's kept θ_i
    w^{t+1} ← mean of θ_i

Departs from the paper: it solves kernel machines in one problem; here a cohort trains nets in
rounds.
"""

from typing import Any, Literal

from torch import Tensor, nn

from pl_fed.arguments import check_choice, check_nonnegative
from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Model
from pl_fed.types import Batch


class MeanRegularized(Client):
    """Mean-regularised multi-task learning: personal models with a pull to w, their mean.

    In Ditto the global model has its own objective; here it is only the mean.

    Args:
        net: The net that clients train: see :class:`Client`.
        lam: λ ≥ 0, the strength of the pull: 0 trains local models.
        mean: The models in the mean: ``"clients"``, the current models of all clients, or
            ``"cohort"``, those of the round. With ``"clients"`` and partial participation, an
            attack that sends a model counts clients / cohort times as much as a client's model.
        local_steps: Minibatch steps on θ_i in a round; or give ``local_epochs``.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If ``lam`` is negative or infinite, or ``mean`` is unknown.

    Example:
        >>> client = MeanRegularized(nn.Linear(4, 2), lam=0.5, mean="cohort")
        >>> client.trained, client.evaluated
        (('personal',), ('global', 'personal'))
    """

    def __init__(
        self,
        net: nn.Module,
        lam: float = 1.0,
        mean: Literal["clients", "cohort"] = "clients",
        **kwargs: Any,
    ) -> None:
        models = {"global": Model(trained=False), "personal": Model()}
        super().__init__(net, models=models, **kwargs)
        check_nonnegative(lam=lam)
        check_choice(("clients", "cohort"), mean=mean)
        self.lam = lam
        self.mean_of = mean

    def begin(self, client: ClientRound) -> None:
        """Store the client's model from before the local steps."""
        if self.mean_of == "clients":
            client.extra["before"] = client.models["personal"].parameters.clone()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return f_i(θ_i) + λ/2 ‖θ_i − w^t‖² on the minibatch."""
        pull = self.lam / 2 * self.squared_distance("personal", to="broadcast")
        return self.loss("personal", batch) + pull

    def end_round(self, client: ClientRound) -> Tensor:
        """Upload θ_i − w^t, or the client's change of the mean over all clients."""
        own, broadcast = client.models["personal"].parameters, client.broadcast.parameters
        if self.mean_of == "cohort":
            return own - broadcast
        return self.upload_change(own, client.extra["before"], broadcast)
