"""SCAFFOLD: federated averaging with control variates against the drift of clients.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich and A. T. Suresh. "SCAFFOLD:
Stochastic controlled averaging for federated learning". ICML 2020. arXiv 1910.06378.

Algorithm 1: client i keeps c_i, the server c, both 0 at first. From y_i = x, K local steps::

    y_i ← y_i − η_l (g_i(y_i) − c_i + c)
    c_i⁺ = ∇f_i(x)  (option I)    or    c_i − c + (x − y_i) / (K η_l)  (option II)
    x ← x + η_g mean(y_i − x),    c ← c + |S| / N · mean(c_i⁺ − c_i)

The means are over the cohort S; N is the number of clients, and η_g the server's learning rate.

Departs from the paper: K and η_l may differ between clients and rounds, for unequal work and
schedules. Option I's gradient is the mean over the minibatches of one pass. All minibatches have
the same weight, as in local steps.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_choice
from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Model
from pl_fed.data.batches import LocalWork
from pl_fed.data.client_data import ClientData
from pl_fed.types import Batch, Population


class Scaffold(Client):
    """SCAFFOLD: FedAvg with the correction c − c_i of local gradients.

    The local optimizer must be plain SGD, because its path determines c_i. Weight decay is part of
    f_i. The server takes the uniform mean of the control variates for any aggregator.

    Args:
        net: The net that clients train: see :class:`Client`.
        control: The computation of c_i. ``"path"``: the mean gradient along the local steps
            (option II), at no cost. ``"start"``: the gradient at x (option I), at the cost of
            training another model; gradient clipping clips its minibatch gradients, too.
        optimizer: Builds the local optimizer in each round: SGD without momentum, with learning
            rate η_l; 0.05 by default.
        local_steps: K, the minibatch steps in a round; or give ``local_epochs``.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If ``control`` is unknown. Before training, if the local optimizer is not SGD,
            or has momentum or maximises.

    Example:
        >>> client = Scaffold(nn.Linear(4, 2), control="path")
        >>> list(client.state_defaults()), list(client.server_state_defaults())  # c_i and c
        (['own_control'], ['control'])
    """

    def __init__(
        self, net: nn.Module, control: Literal["path", "start"] = "path", **kwargs: Any
    ) -> None:
        check_choice(("path", "start"), control=control)
        models = {"global": Model()}
        if control == "start":  # sums up the gradients at x, over one pass
            models["slope"] = Model(
                kept=False,
                evaluated=False,
                work=LocalWork(),
                lr=1.0,
                options={"weight_decay": 0.0},  # `end_round` adds its gradient at x
            )
        super().__init__(net, models=models, **kwargs)
        self.add_state("own_control", self.zero_row, mean="control")
        self.control = control
        self.reads_rates = control == "start"  # a schedule would weigh the gradients at x
        self.weight_decay = 0.0  # of the local optimizer: set by `check`

    def check(self, data: ClientData, population: Population) -> None:
        """Refuse a local optimizer that does not step by the learning rate times the gradient."""
        needs = "its steps determine the control variates"
        self.refuse_mixed_options(needs, "lr", "weight_decay", "momentum")
        optimizer = self.objective.build_optimizer(self.trained_parameters)
        first, name = optimizer.param_groups[0], type(optimizer).__name__
        self.weight_decay = float(first.get("weight_decay", 0.0))
        wrong = {option: first[option] for option in ("momentum", "maximize") if first.get(option)}
        if type(optimizer) is not torch.optim.SGD or wrong:
            options = ", ".join(f"{option}={value}" for option, value in wrong.items())
            raise ValueError(
                "Expected argument `optimizer` to build torch.optim.SGD without momentum, because"
                f" its steps determine the control variates, but got {name}({options})."
            )

    def begin(self, client: ClientRound) -> None:
        """Add c − c_i, and ⟨c − c_i, x⟩, to the rows that the local steps read."""
        correction = client.server_states["control"] - client.states["own_control"]
        client.extra["correction"] = correction
        client.extra["offset"] = (correction @ client.broadcast.parameters)[:, None]
        if self.control == "start":
            client.models["slope"].parameters.zero_()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return f_i(y) + ⟨y − x, c − c_i⟩ on the minibatch."""
        loss = self.loss("global", batch)
        loss = loss + self.inner_product("global", "correction") - self.read("offset")[0]
        return loss if self.control == "path" else loss + self._slope_at_start(batch)

    def _slope_at_start(self, batch: Batch) -> Tensor:
        """Return 0 with the gradient of f_i at x; the model ``slope`` sums up these gradients."""
        start, slope = self.tensors("broadcast"), self.parameters_of("slope")
        at = {name: start[name] + (slope[name] - slope[name].detach()) for name in slope}
        loss = self.loss_at("slope", at, batch)
        return loss - loss.detach()

    def end_round(self, client: ClientRound) -> Tensor:
        """Update c_i, and with it the server's c, and upload y_i − x."""
        start = client.broadcast.parameters
        change = client.models["global"].parameters - start
        source = "global" if self.control == "path" else "slope"
        path = change if self.control == "path" else client.models["slope"].parameters
        length = client.steps[source] * client.lr[source]  # K η_l
        control = -path / torch.where(length == 0, 1, length)
        if self.control == "path":
            control = control - client.extra["correction"]
        else:
            control = control + self.weight_decay * start
        # without a step that moves, c_i stays
        own = client.states["own_control"]
        client.states["own_control"] = torch.where(length == 0, own, control)
        return change
