"""FedADMM: one global model by ADMM, with a dual variable for each client.

Y. Gong, Y. Li and N. M. Freris. "FedADMM: A robust federated deep learning framework with
adaptivity to system heterogeneity". ICDE 2022. arXiv 2204.03529. S. Zhou and G. Y. Li. "Federated
learning via inexact ADMM". TPAMI 2023. arXiv 2204.10607. The form is that of FLAME's paper (S. Zhu
et al., arXiv 2407.16397, section IV-E): its problem (9) for λ → ∞, where θ_i = w_i, is (19)::

    min Σ_i α_i f_i(w_i)   such that w_i = w for all i

In a round a client takes steps on α_i f_i(w_i) + ⟨π_i, w_i − w^t⟩ + ρ/2 ‖w_i − w^t‖² from its own
w_i, then π_i ← π_i + ρ (w_i − w^t). It sends u_i = w_i + π_i / ρ; the mean of the u_i over all
clients is the next w. The objective contains α_i: for steps of the same length, set 1 / α_i times
the learning rate of FedAvg.

The limit concerns solutions, not rounds: FLAME with a large λ reaches FedADMM's w up to O(1/λ), but
needs O(λ) rounds. A round of FLAME moves θ_i and w_i in turn; FedADMM moves both as one.
"""

from typing import Any, Literal

from torch import Tensor, nn

from pl_fed.clients.admm import ADMM
from pl_fed.clients.contract import ClientRound
from pl_fed.nets.modes import full_precision
from pl_fed.types import Batch


class FedADMM(ADMM):
    """FedADMM. The client's w_i is the model ``personal``; :class:`ADMM` describes the upload.

    Args:
        net: The net that clients train: see :class:`Client`.
        rho: The penalty ρ > 0.
        weights: The α_i: ``"uniform"``, 1 / clients, or ``"samples"``, a client's share of all
            training samples.
            Its weight decay acts on w_i without the weight α_i that a part of f_i would have.
        local_steps: Minibatch steps on w_i in a round; or give ``local_epochs``.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> client = FedADMM(nn.Linear(4, 2), rho=0.3)
        >>> client.trained, list(client.state_defaults())
        (('personal',), ['personal', 'dual', 'sent', 'personal.statistics'])
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
        with full_precision(batch.device):  # bfloat16 would change the difference of the products
            offset = self.read("dual") @ self.read("broadcast")
        price = self.inner_product("personal", "dual") - offset
        return loss + price + self.rho / 2 * self.squared_distance("personal", to="broadcast")

    def end_round(self, client: ClientRound) -> Tensor:
        """Update π_i, and upload u_i."""
        w, own = client.broadcast.parameters, client.models["personal"].parameters
        before = client.states["sent"]
        dual = client.states["dual"] + self.rho * (own - w)
        client.states |= {"dual": dual, "sent": own + dual / self.rho}
        return self.upload_change(client.states["sent"], before, w)
