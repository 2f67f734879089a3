"""Lp-Proj-2 by ADMM: the clients share a random projection of their models.

S. Lin, Y. Han, X. Li and Z. Zhang. "Personalized federated learning towards communication
efficiency, robustness and fairness". NeurIPS 2022 (Lp-Proj). S. Zhu et al. "On ADMM in
heterogeneous federated learning: Personalization, robustness, and fairness". arXiv 2407.16397,
appendix C, Algorithm 2, is the algorithm here. It is FLAME, except that w, w_i, π_i and u_i are
short, and the projection P θ_i replaces θ_i::

    θ_i ← θ_i − η (∇f_i(θ_i) + λ Pᵀ (P θ_i − w_i))                                         line 12
    w_i ← (λ α_i P θ_i + ρ w − π_i) / (λ α_i + ρ)                                   (186), line 14

P is a :class:`~pl_fed.functional.projection.SparseProjection`, the same for all clients and rounds.
Neither paper names its P. Replacing P by c P is the same as replacing λ by c² λ and ρ by c² ρ.

The server's model is Pᵀ w instead of w, and a client uploads Pᵀ of its change. These rows are as
long as the net. P restores the short rows, because P Pᵀ = I, and lengths and angles are the same.
Rules that depend on these alone (means, norm clipping, Krum, the geometric median) therefore act as
on the short rows; coordinate-wise rules do not. Forged uploads lose their part outside of the span
of P's rows. As in the paper, the global model is of no use by itself, and is not evaluated.

Corrections of slips in the paper: the upload is u_i (line 4 has z_i), and θ_i^(t+1) is the last
iterate (line 13 takes the previous one).
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_integers, check_positive
from pl_fed.clients.admm import ADMM
from pl_fed.clients.contract import ClientRound, Model
from pl_fed.functional.projection import SparseProjection
from pl_fed.types import Batch


class LpProj(ADMM):
    """Lp-Proj-2 by ADMM: θ_i is the model ``personal``; :class:`ADMM` describes the upload.

    Args:
        net: The net that clients train: see :class:`Client`.
        dimensions: d_sub, the length of a projected model: from 1 to the number of parameters.
        lam: λ > 0, the strength of the pull; it acts in the span of P's rows only.
        rho: The penalty ρ > 0.
        weights: The α_i: ``"uniform"``, 1 / clients, or ``"samples"``, a client's share of all
            training samples.
        projection_seed: Seed of P.
        local_steps: Minibatch steps on θ_i in a round; or give ``local_epochs``.
        local_epochs: H, the passes over the client's data in a round; 1 if neither is given.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> client = LpProj(nn.Linear(4, 2), dimensions=3)
        >>> {name: len(row) for name, row in client.state_defaults().items()}
        {'personal': 10, 'local': 3, 'dual': 3, 'personal.statistics': 0}
    """

    def __init__(
        self,
        net: nn.Module,
        dimensions: int,
        lam: float = 1.0,
        rho: float = 0.1,
        weights: Literal["uniform", "samples"] = "uniform",
        projection_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, rho, weights, **kwargs)
        check_positive(lam=lam)
        check_integers(1, dimensions=dimensions)
        numel = self.row("global").layout.numel
        if dimensions > numel:
            raise ValueError(
                "Expected argument `dimensions` to be at most the number of trainable parameters,"
                f" {numel}, but got {dimensions}."
            )
        self.lam = lam
        self.projection = SparseProjection(numel, dimensions, projection_seed)
        self.set_models({"personal": Model()})  # the global model is not evaluated
        self.add_state("local", self._project_initial_row)  # w_i
        self.add_state("dual", torch.zeros(dimensions))  # π_i

    @property
    def shared_numbers(self) -> int:
        """The number of values that cross the network: the short row."""
        return len(self.projection(self.initial_row()))

    @property
    def sent_layout(self) -> None:
        """No layout: clients send short rows, without parameters."""
        return None

    @property
    def project(self) -> Callable[[Tensor], Tensor]:
        """P: the short rows cross the network."""
        return self.projection

    def restrict_rows(self, rows: Tensor) -> Tensor:
        """Return Pᵀ P of the rows: the short rows alone cross the network."""
        restricted: Tensor = self.projection.lift(self.projection(rows))
        return restricted

    def _project_initial_row(self) -> Tensor:
        row: Tensor = self.projection(self.initial_row())
        return row

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return f_i(θ_i) + λ/2 ‖P θ_i − w_i‖² on the minibatch."""
        parameters = self.parameters_of("personal")
        detached = {name: tensor.detach() for name, tensor in parameters.items()}
        theta = torch.cat([tensor.flatten() for tensor in detached.values()])
        difference: Tensor = self.projection(theta) - self.read("local")
        # Pᵀ (P θ − w_i) by hand: autograd's backward pass of a gather would add element by element
        slope = self.row("personal").layout.views(self.projection.lift(difference))
        products = [(slope[name] * (parameters[name] - detached[name])).sum() for name in slope]
        linear = torch.stack(products).sum()  # 0, with the gradient Pᵀ (P θ − w_i)
        return self.loss("personal", batch) + self.lam * (difference.square().sum() / 2 + linear)

    def end_round(self, client: ClientRound) -> Tensor:
        """Update the short w_i and π_i, and upload u_i, lifted to the net's length by Pᵀ."""
        theta = self.projection(client.models["personal"].parameters)
        w = self.projection(client.broadcast.parameters)
        stiffness = self.lam * self.alpha(client.samples)
        change = self.update_in_closed_form(client, theta, w, stiffness)
        upload: Tensor = self.projection.lift(change)
        return upload
