"""ADMM: consensus by the alternating direction method of multipliers (a base class).

S. Zhu et al. "On ADMM in heterogeneous federated learning: Personalization, robustness, and
fairness". arXiv 2407.16397, equations (9)-(14).

Client i has a copy w_i of the global model w, with the constraint w_i = w. A dual variable π_i and
a penalty ρ enforce it. The client sends u_i = w_i + π_i / ρ. The server's next model is the mean of
ALL m clients' last u_i (14), inside and outside of the cohort. This mean is uniform for all weights
α_i of the losses, because the α_i act in the w_i and π_i.
"""

from abc import ABC
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_choice, check_positive
from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Model


class ADMM(Client, ABC):
    """ADMM, the base class of FLAME, FedADMM and Lp-Proj: it declares the models and the upload.

    If all clients take part in each round, a client uploads u_i − w^t. Otherwise it uploads the
    change of its u_i, times cohort / clients. The cohort's mean of these, added to w^t, is the mean
    of all clients' last u_i. The server optimizer must be SGD with learning rate 1 for this.

    With partial participation, robust aggregators and attacks act on these changes, not on u_i:

    - If a defence drops a change, w lacks it until the end. A forged change stays in w.
    - An attack that sends a model (:class:`~pl_fed.attacks.SameValue`, for example) counts
      clients / cohort times as much as a forged u_i in (14), in each round of the attacker.

    In FLAME's experiments all clients take part in each round, except for Figure 12.

    Args:
        net: The net that clients train: see :class:`Client`.
        rho: The penalty ρ > 0.
        weights: The α_i: ``"uniform"``, 1 / clients, or ``"samples"``, a client's share of all
            training samples.
        local_steps: Minibatch steps on the personal model in a round; or give ``local_epochs``.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If an argument is out of range, or the server weighs uploads by samples: set
            ``weights`` to weigh the clients' losses instead.

    Example:
        >>> from pl_fed.clients import FLAME
        >>> FLAME(nn.Linear(4, 2), weights="samples").mean_of
        'clients'
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
        """Return the weights α_i of clients.

        Args:
            samples: The number of training samples of each client, of any shape.

        Returns:
            A tensor of the same shape.
        """
        if self.weights == "uniform":
            return torch.full_like(samples, 1 / self.population.clients)
        return samples / self.population.samples

    def update_in_closed_form(
        self, client: ClientRound, theta: Tensor, w: Tensor, stiffness: Tensor
    ) -> Tensor:
        """Update the states ``local``, w_i, by (12) and ``dual``, π_i, by (13); return the upload.

        Args:
            client: The round of several clients: see :meth:`Client.end_round`.
            theta: The θ_i, the centres of the pull on the w_i, [clients, length].
            w: w^t, [length].
            stiffness: λ α_i, [clients, 1].
        """
        local, dual = client.states["local"], client.states["dual"]
        before = local + dual / self.rho
        local = (stiffness * theta + self.rho * w - dual) / (stiffness + self.rho)
        dual = dual + self.rho * (local - w)
        client.states |= {"local": local, "dual": dual}
        return self.upload_change(local + dual / self.rho, before, w)
