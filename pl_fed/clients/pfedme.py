"""pFedMe: personal models by Moreau envelopes.

C. T. Dinh, N. H. Tran and T. D. Nguyen. "Personalized federated learning with Moreau envelopes".
NeurIPS 2020. arXiv 2006.08848. The problem: min over w of Σ_i F_i(w) / N, where F_i(w) is the
minimum of f_i(θ_i) + λ/2 ‖θ_i − w‖² over θ_i. Algorithm 1, in each of R local rounds::

    θ_i ← approximate minimiser of f_i(θ) + λ/2 ‖θ − w_i‖² on a new minibatch, by K gradient steps
    w_i ← w_i − η λ (w_i − θ_i)

from w_i = w^t. The server moves by w ← (1 − β) w + β (mean of the cohort's w_i): β is the learning
rate of the federation's server optimizer.

As in the reference code, the K steps continue from the current θ_i. θ_i begins each round at w^t.

Departs from the paper: clients outside of the cohort do not train, because they would not send
their results. :class:`~pl_fed.clients.PFedMeEpochs` is pFedMe in the form of FLAME's paper.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_integers, check_positive
from pl_fed.clients.base import Client
from pl_fed.clients.contract import Model
from pl_fed.data.client_data import ClientData
from pl_fed.functional.losses import squared_distance
from pl_fed.types import Batch, Population


class PFedMe(Client):
    """pFedMe (Algorithm 1): w_i is the model ``global``, and θ_i the model ``personal``.

    The optimizer is that of w_i. Its weight decay is part of f_i, and so acts in the steps on θ_i.
    Gradient clipping clips the change of θ_i in K steps.

    Args:
        net: The net that clients train: see :class:`Client`. It must not have running statistics
            (BatchNorm).
        lam: λ > 0, the strength of the pull.
        personal_steps: K, the gradient steps on θ_i in a local round.
        personal_lr: The learning rate of the steps on θ_i.
        optimizer: Builds the SGD optimizer of w_i, with learning rate η; 0.05 by default.
        lr_scheduler: Must be ``None``: a schedule would act on θ_i, too.
        local_steps: R, the local rounds, each on a new minibatch; or give ``local_epochs``.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If an argument is out of range, there is an ``lr_scheduler``, the optimizer is
            not SGD, or the net has running statistics.

    Example:
        >>> client = PFedMe(nn.Linear(4, 2), lam=15.0, personal_steps=5)
        >>> client.trained, list(client.state_defaults())
        (('global', 'personal'), ['personal', 'personal.statistics'])
    """

    single_batch_reason = "a local round moves θ_i by K steps on its minibatch"

    def __init__(
        self,
        net: nn.Module,
        lam: float = 15.0,
        personal_steps: int = 5,
        personal_lr: float = 0.01,
        **kwargs: Any,
    ) -> None:
        decays_in_steps = {"weight_decay": 0.0}  # it is part of f_i, in the K steps
        exactly = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, **decays_in_steps}
        models = {
            "global": Model(options=decays_in_steps),
            "personal": Model(lr=1.0, options=exactly),  # moves to the end of its K steps
        }
        super().__init__(net, models=models, **kwargs)
        check_positive(lam=lam, personal_lr=personal_lr)
        check_integers(1, personal_steps=personal_steps)
        self.refuse_running_statistics("a local round evaluates the net at several points")
        self._refuse_schedule(self.lr_scheduler)
        self.lam = lam
        self.personal_steps = personal_steps
        self.personal_lr = personal_lr
        self.weight_decay = 0.0  # of the local optimizer: set by `check`

    def check(self, data: ClientData, population: Population) -> None:
        """Read the weight decay from the optimizer; it must be SGD without a schedule.

        Raises:
            ValueError: If the optimizer is not SGD, or a LightningModule has a schedule.
        """
        optimizer = self.objective.build_optimizer(self.trained_parameters)
        if type(optimizer) is not torch.optim.SGD:
            raise ValueError(
                "Expected argument `optimizer` to build torch.optim.SGD but got"
                f" {type(optimizer).__name__}."
            )
        self.refuse_mixed_options("weight decay is part of f_i", "weight_decay")
        self._refuse_schedule(self.build_schedule(optimizer))
        parameters = list(self.row("global").tensors.values())
        first = self.objective.optimizer(parameters).param_groups[0]  # without the models' options
        self.weight_decay = float(first["weight_decay"])

    def _refuse_schedule(self, schedule: object) -> None:
        if schedule is not None:
            raise ValueError(
                "Expected argument `lr_scheduler` to be None, as it would scale the steps of both"
                f" models, but got {schedule!r}."
            )

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Take K steps on θ_i, and return λ/2 ‖w_i − θ_i‖² as the objective of w_i.

        The gradient of θ_i is the difference to its end point, and its learning rate is 1. The
        logged loss is f_i(θ_i) + λ/2 ‖θ_i − w_i‖² after the steps.
        """
        w, personal = self.parameters_of("global"), self.parameters_of("personal")
        centre = {name: tensor.detach() for name, tensor in w.items()}
        before = {name: tensor.detach() for name, tensor in personal.items()}
        index: int | Tensor = batch_idx  # a tensor in compiled steps
        if not isinstance(index, Tensor):
            index = torch.full((), index, device=batch.device)  # a copy from the CPU would wait
        is_first = index == 0
        theta = {name: torch.where(is_first, centre[name], before[name]) for name in personal}
        for _ in range(self.personal_steps):
            slope = self.gradient_at("personal", theta, batch)
            theta = {
                name: at
                - self.personal_lr
                * (slope[name] + self.weight_decay * at + self.lam * (at - centre[name]))
                for name, at in theta.items()
            }
        end = {name: tensor.detach() for name, tensor in theta.items()}
        pull = self.lam / 2 * squared_distance(list(w.values()), list(end.values()))
        moves = [
            ((personal[name] - before[name]) * (before[name] - end[name])).sum()
            for name in personal
        ]
        value = self.loss_at("personal", end, batch).detach()
        return {"loss": value + pull + torch.stack(moves).sum()}
