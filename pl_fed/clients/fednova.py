"""FedNova: federated averaging of normalised updates, for unequal numbers of local steps.

J. Wang, Q. Liu, H. Liang, G. Joshi and H. V. Poor. "Tackling the objective inconsistency problem in
heterogeneous federated optimization". NeurIPS 2020. arXiv 2007.07481.

Client i takes τ_i local steps, and its update is Δ_i = −η G_i a_i, with the gradients G_i and their
coefficients a_i. The server steps along (section 5, with p_i the weights of the mean)::

    w ← w + τ_eff Σ_i p_i Δ_i / ‖a_i‖₁,    τ_eff = Σ_i p_i ‖a_i‖₁

    ‖a_i‖₁ = τ_i                                          for SGD
    ‖a_i‖₁ = (τ_i − ρ (1 − ρ^τ_i) / (1 − ρ)) / (1 − ρ)    for SGD with momentum ρ

FedAvg, Σ_i p_i Δ_i, weighs the loss of client i by p_i τ_i instead of p_i: its fixed point moves
towards clients with many steps.

Departs from the paper: by default, p_i is 1 / |S|; the paper's n_i / n is that of
``aggregators.Mean(weighting="samples")``. With momentum, τ_eff is Σ_i p_i ‖a_i‖₁ and not
Σ_i p_i τ_i, as in the authors' code: with equal steps, FedNova is then FedAvg.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Model
from pl_fed.data.client_data import ClientData
from pl_fed.types import Batch, Population


class FedNova(Client):
    """FedNova: FedAvg that divides each update by the client's local work; equal work is FedAvg.

    Work is unequal with ``local_epochs`` and clients of unequal sizes, or by partial work under a
    deadline: see ``federation.systems``. The local optimizer must be SGD.

    Args:
        net: The net that clients train: see :class:`Client`.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: Before training, if the local optimizer is not SGD, or has dampening, Nesterov
            momentum, a momentum that clients keep between rounds, or a momentum beside a schedule
            of local steps.

    Example:
        >>> client = FedNova(nn.Linear(4, 2), local_epochs=5)
        >>> client.trained, list(client.server_state_defaults())
        (('global',), ['work'])
    """

    normalizer = "work"
    single_batch_reason = "its normalisation counts the steps of the local optimizer"

    def __init__(self, net: nn.Module, **kwargs: Any) -> None:
        super().__init__(net, models={"global": Model()}, **kwargs)
        self.add_server_state("work", 0.0)
        self.momentum = 0.0  # of the local optimizer: set by `check`

    def check(self, data: ClientData, population: Population) -> None:
        """Refuse a local optimizer whose update has other coefficients of the gradients."""
        needs = "its coefficients of the gradients normalise the updates"
        self.refuse_mixed_options(needs, "momentum")
        optimizer = self.objective.build_optimizer(self.trained_parameters)
        first, name = optimizer.param_groups[0], type(optimizer).__name__
        self.momentum = float(first.get("momentum", 0.0))
        wrong = {option: first[option] for option in ("dampening", "nesterov") if first.get(option)}
        if type(optimizer) is not torch.optim.SGD or wrong or self.momentum >= 1:
            options = ", ".join(f"{option}={value}" for option, value in wrong.items())
            raise ValueError(
                "Expected argument `optimizer` to build torch.optim.SGD, with a momentum below 1 at"
                f" most, because {needs}, but got {name}({options})."
            )
        self.reads_rates = self.momentum > 0  # ‖a‖₁ then depends on the order of the rates
        if self.momentum and self.keeps_optimizer_state:
            raise ValueError(
                "Expected `federation.engine.keep_optimizer_state` to be false for FedNova with"
                f" momentum but got true: the updates of earlier rounds would count again; {needs}."
            )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(w) on the minibatch."""
        return self.loss("global", batch)

    def end_round(self, client: ClientRound) -> Tensor:
        """Send ‖a_k‖₁ beside the change of the model; η ‖a_k‖₁ with a schedule of local steps."""
        change = client.models["global"].parameters - client.broadcast.parameters
        steps, rho = client.steps["global"].to(change), self.momentum
        work = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        if self.local_schedule is not None:
            work = work * client.lr["global"]  # the sum of the rates
        client.proposals["work"] = work
        return change
