"""Per-FedAvg: a global model, trained to be good after one step on a client's own data.

A. Fallah, A. Mokhtari and A. Ozdaglar. "Personalized federated learning with theoretical
guarantees: A model-agnostic meta-learning approach". NeurIPS 2020. arXiv 2002.07948.

The objective: the mean over clients of F_k(w) = f_k(w − α ∇f_k(w)). A local step (Algorithm 1)
takes w to w − β (I − α ∇²f_k(w; D″)) ∇f_k(w̃; D′), where w̃ = w − α ∇f_k(w; D), with three
independent batches. HF replaces the product of the Hessian with a vector u by
(∇f_k(w + δ u; D″) − ∇f_k(w − δ u; D″)) / (2 δ); FO omits it.

The three batches are parts of the minibatch with every third sample: D′ from the first, D from the
second and D″ from the third sample on. In a minibatch of one or two samples some parts are empty;
their gradient is 0. The step to w̃ is one of plain gradient descent for any local optimizer, in
training and before an evaluation.
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
    """Per-FedAvg: federated meta-learning; a step from the global model gives a personal model.

    Args:
        net: The net that clients train: see :class:`Client`. It must not have running statistics
            (BatchNorm).
        adaptation_lr: α ≥ 0, the learning rate of the step on a client's own data.
        hessian: The computation of the Hessian's product with a vector: ``"difference"`` of two
            gradients in full precision (HF), ``"exact"``, or ``"none"`` to omit it (FO).
        difference: δ > 0 of HF. At a jump of the gradient (ReLU) the product is as large as the
            jump over 2 δ. A large β may then diverge where ``"exact"`` converges.
        adaptation_steps: Steps on a client's own data before an evaluation, ≥ 1; 1 in the paper.
        optimizer: Builds the local optimizer in each round, with learning rate β; SGD with 0.05 by
            default.
        local_steps: τ, the minibatch steps in a round; or give ``local_epochs``.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If an argument is out of range, or the net has running statistics.

    Example:
        >>> client = PerFedAvg(nn.Linear(4, 2), adaptation_lr=0.1, hessian="none")
        >>> client.trained, client.adaptation.trained
        (('global',), ('personal',))
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
            "a step evaluates the net at several points other than the model"
        )
        self.adaptation_lr = adaptation_lr
        self.hessian = hessian
        self.difference = difference
        self.adaptation = Objective(
            self.adaptation_step,
            {"personal": Model(work=LocalWork(steps=adaptation_steps))},
            partial(torch.optim.SGD, lr=adaptation_lr),
            accumulates=False,
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return f_k(w̃; D′), with the gradient (I − α ∇²f_k(w; D″)) ∇f_k(w̃; D′)."""
        outer, inner, third = (_take_third(batch, first) for first in range(3))
        parameters = self.parameters_of("global")
        w = {name: parameter.detach() for name, parameter in parameters.items()}
        adapted = _add(w, self.gradient_at("global", w, inner), -self.adaptation_lr)
        direction = self.gradient_at("global", adapted, outer)
        if self.hessian != "none":
            product = self._hessian_product(w, direction, third)
            direction = _add(direction, product, -self.adaptation_lr)
        value = self.loss_at("global", adapted, outer).detach()
        linear = _dot(parameters, direction)
        return value + (linear - linear.detach())

    def adaptation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return f_k(v) on the minibatch."""
        return self.loss("personal", batch)

    def _hessian_product(self, w: Tensors, u: Tensors, batch: Batch) -> Tensors:
        """Return ∇²f_k(w) u on a batch."""
        if self.hessian == "exact":
            product: Tensors = torch.func.grad(
                lambda at: _dot(self.gradient_at("global", at, batch), u)
            )(w)
            return product
        with full_precision(batch.device):  # in bfloat16 the two gradients would be equal
            plus, minus = (
                self.gradient_at("global", _add(w, u, sign * self.difference), batch)
                for sign in (1, -1)
            )
        return {name: (plus[name] - minus[name]) / (2 * self.difference) for name in w}


def _take_third(batch: Batch, first: int) -> Batch:
    """Return every third sample from ``first`` on, or one masked sample if there are none."""
    part = batch.part(slice(first, None, 3))
    if part.size:
        return part
    padding = batch.part(slice(1))
    return padding._replace(mask=torch.zeros(1, dtype=torch.bool, device=padding.device))


def _add(tensors: Mapping[str, Tensor], direction: Mapping[str, Tensor], factor: float) -> Tensors:
    return {name: tensors[name] + factor * direction[name] for name in tensors}


def _dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()
