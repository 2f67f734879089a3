"""FedADMM: one global model by ADMM, with a dual variable per client.

Y. Gong, Y. Li and N. M. Freris. "FedADMM: A robust federated deep learning framework with
adaptivity to system heterogeneity". ICDE 2022. arXiv 2204.03529. S. Zhou and G. Y. Li. "Federated
learning via inexact ADMM". TPAMI 2023. arXiv 2204.10607. As FLAME's paper has it (S. Zhu et al.,
arXiv 2407.16397, section IV-E): its problem (9) for λ → ∞, where θ_i = w_i, is (19)::

    min Σ_i α_i f_i(w_i)   such that w_i = w for all i

In a round a client takes steps on α_i f_i(w_i) + ⟨π_i, w_i − w^t⟩ + ρ/2 ‖w_i − w^t‖² from its own
w_i, then π_i ← π_i + ρ (w_i − w^t), and it sends u_i = w_i + π_i / ρ, whose mean over all clients
is the next w. Note the α_i in the objective: a learning rate of FedAvg's corresponds to one that is
1 / α_i times as large here.

The limit is one of solutions, and not of rounds: FLAME with a large λ comes to FedADMM's w up to
O(1/λ), but takes O(λ) rounds to it, as each of them moves θ_i and w_i in turn, where FedADMM moves
both as one.
"""

from typing import Any, Literal

from torch import Tensor, nn

from pl_fed.clients.admm import ADMM
from pl_fed.clients.contract import ClientRound
from pl_fed.types import Batch


class FedADMM(ADMM):
    """FedADMM. The client's w_i is the model ``personal``; see :class:`ADMM` for what is uploaded.

    Args:
        net: See :class:`Client`, as for all that is not named here.
        rho: The penalty ρ > 0.
        weights: The α_i: ``"uniform"``, 1 / clients, or ``"samples"``, a client's share of all
            training samples.
        **kwargs: ``optimizer``, ``lr_scheduler``, ``local_steps``, ``local_epochs``, ``criterion``.
            Weight decay of the optimizer acts on w_i as it is: as a part of f_i it would be
            weighed by α_i.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        net: nn.Module,
        rho: float = 0.1,
        weights: Literal["uniform", "samples"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, rho, weights, **kwargs)
        self.add_state("dual", self.zero_row)  # π_i
        self.add_state("sent", self.initial_row)  # u_i

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return α_i f_i(w_i) + ⟨π_i, w_i − w^t⟩ + ρ/2 ‖w_i − w^t‖² on the minibatch."""
        loss = self.alpha(self.read("samples")).squeeze() * self.loss("personal", batch)
        price = self.inner_product("personal", "dual") - self.read("dual") @ self.read("broadcast")
        return loss + price + self.rho / 2 * self.squared_distance("personal", to="broadcast")

    def end_round(self, client: ClientRound) -> Tensor:
        """Update π_i, and upload u_i."""
        w, own = client.broadcast.parameters, client.models["personal"].parameters
        before = client.states["sent"]
        dual = client.states["dual"] + self.rho * (own - w)
        client.states |= {"dual": dual, "sent": own + dual / self.rho}
        return self.upload_change(client.states["sent"], before, w)
