"""What the ADMM algorithms share: each client has a copy of the global model, with a dual variable.

S. Zhu et al. "On ADMM in heterogeneous federated learning: Personalization, robustness, and
fairness". arXiv 2407.16397, equations (9)-(14). The copies w_i are to equal w, for which client i
pays with its dual π_i and a penalty ρ. What it sends is u_i = w_i + π_i / ρ, and the server's next
model is the mean of ALL m clients' last u_i (14), also of those that take no part in the round.
That mean is the plain one whatever the weights α_i of the losses are: these act in the w_i and π_i.
"""

from abc import ABC
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_choice, check_positive
from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Model


class ADMM(Client, ABC):
    """Consensus by ADMM: a base class.

    If all clients take part in each round, a client uploads u_i − w^t. Else it uploads how its u_i
    changed, times cohort / clients: the mean of that over the cohort, added to w^t, leaves the mean
    of the last u_i of all clients, as long as the server's optimizer is SGD with learning rate 1.
    Robust aggregators, and attacks, then work on those changes instead of the u_i; and a change
    that a defence drops or an attack forges is missing in w, or stays in it, until the end. An
    attack that sends a model (:class:`~pl_fed.attacks.SameValue`, say) then counts clients / cohort
    times as much as a forged u_i does in (14), each time that the attacker is drawn. In FLAME's
    experiments all clients take part in each round, but for Figure 12.

    Args:
        net: See :class:`Client`, as for all that is not named here.
        rho: The penalty ρ > 0.
        weights: The α_i: ``"uniform"``, 1 / clients, or ``"samples"``, a client's share of all
            training samples.
        **kwargs: See :class:`Client`.

    Raises:
        ValueError: If an argument is out of range, or the server's mean is one by samples: weigh
            the clients' losses by ``weights`` instead.
    """

    mean_of = "clients"

    def __init__(
        self,
        net: nn.Module,
        rho: float = 0.1,
        weights: Literal["uniform", "samples"] = "uniform",
        **kwargs: Any,
    ) -> None:
        models = {"global": Model(trained=False), "personal": Model()}
        super().__init__(net, models=models, **kwargs)
        check_positive(rho=rho)
        check_choice(("uniform", "samples"), weights=weights)
        self.rho = rho
        self.weights = weights

    def alpha(self, samples: Tensor) -> Tensor:
        """Return α_i of clients with so many samples, a tensor of the same shape."""
        if self.weights == "uniform":
            return torch.full_like(samples, 1 / self.population.clients)
        return samples / self.population.samples

    def update_in_closed_form(
        self, client: ClientRound, theta: Tensor, w: Tensor, stiffness: Tensor
    ) -> Tensor:
        """Update the states ``local``, w_i, by (12) and ``dual``, π_i, by (13); return the upload.

        Args:
            client: See :meth:`Client.end_round`.
            theta: What the w_i are pulled to, [clients, length].
            w: w^t, [length].
            stiffness: λ α_i, [clients, 1].
        """
        local, dual = client.states["local"], client.states["dual"]
        before = local + dual / self.rho
        local = (stiffness * theta + self.rho * w - dual) / (stiffness + self.rho)
        dual = dual + self.rho * (local - w)
        client.states |= {"local": local, "dual": dual}
        return self.upload_change(local + dual / self.rho, before, w)
