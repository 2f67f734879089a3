"""Per-FedAvg: a global model that is good after a step on a client's own data.

A. Fallah, A. Mokhtari and A. Ozdaglar. "Personalized federated learning with theoretical
guarantees: A model-agnostic meta-learning approach". NeurIPS 2020. arXiv 2002.07948.

The objective: the mean over clients of F_k(w) = f_k(w − α ∇f_k(w)). A local step (Algorithm 1)
takes w to w − β (I − α ∇²f_k(w; D″)) ∇f_k(w̃; D′), where w̃ = w − α ∇f_k(w; D), of three independent
batches. HF replaces the product of the Hessian with a vector u by
(∇f_k(w + δ u; D″) − ∇f_k(w − δ u; D″)) / (2 δ), FO leaves it out.

The three batches are parts of the minibatch: D′ has its first sample and every third from there on,
D those after these, D″ the rest. A part that is empty, in a minibatch of one or two samples, has
gradient 0. The step w̃ is one of plain gradient descent, in training and before an evaluation,
whatever the local optimizer is.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from pl_fed.arguments import (
    check_choice,
    check_integers,
    check_nonnegative,
    check_positive,
)
from pl_fed.clients.base import Client
from pl_fed.clients.contract import Model, Objective
from pl_fed.data.batches import LocalWork
from pl_fed.nets.modes import full_precision
from pl_fed.types import Batch

Hessian = Literal["difference", "exact", "none"]
Tensors = dict[str, Tensor]


class PerFedAvg(Client):
    """Meta-learning by federated averaging; a client's own model is a step away from the global.

    Args:
        net: See :class:`Client`, as for all that is not named here. It must not have running
            statistics (BatchNorm).
        adaptation_lr: α >= 0, the learning rate of the step on a client's own data.
        hessian: How the Hessian's product with a vector is found: ``"difference"`` of two
            gradients (HF), in full precision, ``"exact"``, or ``"none"`` at all (FO).
        difference: δ > 0 of HF. Where a gradient jumps (ReLU), the product is as large as the jump
            over 2 δ: with too large a β this diverges where ``"exact"`` does not.
        adaptation_steps: Steps on a client's own data before an evaluation, >= 1; 1 in the paper.
        **kwargs: ``optimizer`` (its learning rate is β), ``lr_scheduler``, ``local_steps`` (τ),
            ``local_epochs``, ``criterion``.

    Raises:
        ValueError: If an argument is out of range, or the net has running statistics.
    """

    def __init__(
        self,
        net: nn.Module,
        adaptation_lr: float = 0.01,
        hessian: Hessian = "difference",
        difference: float = 1e-3,
        adaptation_steps: int = 1,
        **kwargs: Any,
    ) -> None:
        models = {"global": Model(), "personal": Model(trained=False, kept=False)}
        super().__init__(net, models=models, **kwargs)
        check_nonnegative(adaptation_lr=adaptation_lr)
        check_positive(difference=difference)
        check_integers(1, adaptation_steps=adaptation_steps)
        check_choice(get_args(Hessian), hessian=hessian)
        self.refuse_running_statistics(
            "a step goes through several points, and none of them is the model's"
        )
        self.adaptation_lr = adaptation_lr
        self.hessian = hessian
        self.difference = difference
        self.adaptation = Objective(
            self.adaptation_step,
            {"personal": Model(work=LocalWork(steps=adaptation_steps))},
            partial(torch.optim.SGD, lr=adaptation_lr),
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return f_k(w̃; D′), with the gradient (I − α ∇²f_k(w; D″)) ∇f_k(w̃; D′)."""
        outer, inner, third = (_part(batch, i) for i in range(3))
        live = self.parameters_of("global")
        w = {name: parameter.detach() for name, parameter in live.items()}
        adapted = _moved(w, self.gradient_at("global", w, inner), -self.adaptation_lr)
        direction = self.gradient_at("global", adapted, outer)
        if self.hessian != "none":
            product = self._hessian_product(w, direction, third)
            direction = _moved(direction, product, -self.adaptation_lr)
        value = self.loss_at("global", adapted, outer).detach()
        linear = _dot(live, direction)
        return value + (linear - linear.detach())

    def adaptation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return f_k(v) on the minibatch."""
        return self.loss("personal", batch)

    def _hessian_product(self, w: Tensors, u: Tensors, batch: Batch) -> Tensors:
        """Return ∇²f_k(w) u on a batch."""
        if self.hessian == "exact":
            found: Tensors = torch.func.grad(
                lambda at: _dot(self.gradient_at("global", at, batch), u)
            )(w)
            return found
        with full_precision(batch.device):  # bfloat16 would tell few of the points apart
            ahead, behind = (
                self.gradient_at("global", _moved(w, u, sign * self.difference), batch)
                for sign in (1, -1)
            )
        return {name: (ahead[name] - behind[name]) / (2 * self.difference) for name in w}


def _part(batch: Batch, first: int) -> Batch:
    """Return every third sample from one on; where there is none, one that does not count."""
    part = batch.part(slice(first, None, 3))
    if part.size:
        return part
    one = batch.part(slice(1))
    return one._replace(mask=torch.zeros(1, dtype=torch.bool, device=one.device))


def _moved(at: Mapping[str, Tensor], along: Mapping[str, Tensor], by: float) -> Tensors:
    return {name: at[name] + by * along[name] for name in at}


def _dot(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([(one[name] * other[name]).sum() for name in one]).sum()
