"""PFedBA: a trigger with the gradients of the main task, against personal models.

X. Lyu, Y. Han, W. Wang, J. Liu, Y. Zhu, G. Xu, J. Liu and X. Zhang, "Lurking in the shadows:
Unveiling Stealthy Backdoor Attacks against Personalized Federated Learning", USENIX Security 2024,
arXiv 2406.06207. Attackers pool their samples, and move the pixels t of a stamp, with x' the sample
with the stamp::

    first attack:   t ← t − η ∂ CE(w^t; x', target) / ∂t
    every attack:   t ← t − η ∂ D / ∂t,     D = ‖∇_w CE(w^t; x', target) − ∇_w CE(w^t; x, y)‖₂

with second-order gradients, by the parameters that clients train. They then train on samples with
the stamp. Where both gradients agree, the local training of benign clients on clean samples does
not erase the backdoor.

The paper's loss is the sum of both terms; the authors' code minimises them one after the other, as
here. The code also has a cosine form of D (``alignment: cosine``, 1 − cos), which it does not use.

Departs from the authors' code: the stamp lies in a corner by default, not in the middle; the pool
has the samples of the cohort's attackers; the target of the first stage is that of the attack; the
net is in evaluation mode during the search; pixels stay between the smallest and largest number of
the attackers' samples instead of [−1, 1]. The attack does not train attackers' personal models.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_choice, check_integers, check_positive
from pl_fed.attacks.backdoor import Corner
from pl_fed.attacks.learned_stamp import LearnedStamp
from pl_fed.attacks.own_training import (
    AttackerTraining,
    cross_entropy,
    flat_gradient,
    list_trained,
    select_samples,
)
from pl_fed.types import Batch, RoundContext


class PFedBA(LearnedStamp):
    """PFedBA: the trigger aligns the gradients of the backdoor with those of the main task.

    Args:
        target: The class that the attackers want for samples with the stamp, at least 0.
        samples: Share of an attacker's samples with the stamp, in [0, 1].
        size: Width and height of the stamp, in pixels, at least 1.
        corner: The corner of the stamp: see :class:`Backdoor`.
        start: The value of all pixels before the first search.
        low: The smallest value of a pixel; ``None``: see :class:`LearnedStamp`.
        high: The largest value of a pixel.
        loss_steps: Minibatch steps on the backdoor's loss in the first attack, at least 1.
        trigger_epochs: Passes over the pool for the alignment in each round, at least 1.
        trigger_lr: Learning rate η of the pixels, above 0.
        per_class: Largest number of samples of a class in the pool, at least 1.
        alignment: D: the ``"distance"`` of the gradients, or their ``"cosine"`` form.
        epochs: Passes of an attacker over its samples, at least 1.
        steps: Minibatch steps instead of passes; ``None`` takes ``epochs``.
        batch_size: Largest number of samples in a minibatch, also of the pool.
        lr: Learning rate, above 0.
        momentum: Momentum, at least 0.
        weight_decay: Weight decay, at least 0.

    Shape:
        - ``honest``: [h, d]; not read.
        - ``own``: [b, d].
        - output: [b, d].

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> backdoor, main = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0])
        >>> measure_gap(backdoor, main, "distance"), measure_gap(backdoor, main, "cosine")
        (tensor(1.), tensor(0.1056))
        >>> PFedBA(target=3).target
        3
    """

    def __init__(
        self,
        target: int = 0,
        samples: float = 0.25,
        size: int = 3,
        corner: Corner = "bottom_right",
        start: float = 0.5,
        low: float | None = None,
        high: float | None = None,
        loss_steps: int = 50,
        trigger_epochs: int = 30,
        trigger_lr: float = 0.1,
        per_class: int = 99,
        alignment: Literal["distance", "cosine"] = "distance",
        epochs: int = 5,
        steps: int | None = None,
        batch_size: int = 32,
        lr: float = 0.05,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            target=target,
            samples=samples,
            size=size,
            corner=corner,
            start=start,
            low=low,
            high=high,
            epochs=epochs,
            steps=steps,
            batch_size=batch_size,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
        )
        check_integers(1, loss_steps=loss_steps, trigger_epochs=trigger_epochs, per_class=per_class)
        check_positive(trigger_lr=trigger_lr)
        check_choice(("distance", "cosine"), alignment=alignment)
        self.loss_steps = loss_steps
        self.trigger_epochs = trigger_epochs
        self.trigger_lr = trigger_lr
        self.per_class = per_class
        self.alignment = alignment

    def begin_search(self, attackers: list[int], context: RoundContext, stamp: Tensor) -> Tensor:
        """Return the stamp after steps on the backdoor's loss at w^t."""
        training, pool = self._pool_samples(attackers, context)
        batches = self.draw_passes(pool, self.loss_steps, context, "PFedBA loss")
        for _, (_, batch) in zip(range(self.loss_steps), batches):
            stamp.requires_grad_()
            loss = self.backdoor_loss(training.net, batch.inputs, stamp)
            (slope,) = torch.autograd.grad(loss, [stamp])
            stamp = (stamp.detach() - self.trigger_lr * slope).clamp(*self.bounds)
        return stamp

    def search_stamp(self, attackers: list[int], context: RoundContext, stamp: Tensor) -> Tensor:
        """Return the stamp after steps on the gap between both tasks' gradients."""
        training, pool = self._pool_samples(attackers, context)
        parameters = list_trained(training.net, context)
        batches = self.draw_passes(pool, self.trigger_epochs, context, "PFedBA")
        for _, batch in batches:
            stamp = stamp.detach().requires_grad_()
            main = flat_gradient(cross_entropy(training.net, batch), parameters)
            loss = self.backdoor_loss(training.net, batch.inputs, stamp)
            backdoor = flat_gradient(loss, parameters, create_graph=True)
            gap = measure_gap(backdoor, main, self.alignment)
            (slope,) = torch.autograd.grad(gap, [stamp], materialize_grads=True)
            stamp = (stamp.detach() - self.trigger_lr * slope).clamp(*self.bounds)
        return stamp

    def _pool_samples(
        self, attackers: list[int], context: RoundContext
    ) -> tuple[AttackerTraining, Batch]:
        """Return the model of the first attacker, and the first samples of all by class."""
        samples = [self.read_samples(client, context) for client in attackers]
        x = torch.cat([batch.inputs for batch in samples if batch is not None])
        y = torch.cat([batch.targets for batch in samples if batch is not None])
        pool = Batch(x, y, samples=torch.arange(len(y), device=y.device))
        positions = [
            (y == label).nonzero().flatten()[: self.per_class] for label in y.unique().tolist()
        ]
        first = self.open_training(attackers[0], context)
        return first, select_samples(pool, torch.cat(positions))


def measure_gap(backdoor: Tensor, main: Tensor, alignment: str) -> Tensor:
    """Return D, a scalar with a gradient: ‖backdoor − main‖₂, or 1 − their cosine.

    Args:
        backdoor: The gradient of the backdoor task, [d].
        main: The gradient of the main task, [d].
        alignment: ``"distance"`` or ``"cosine"``.
    """
    if alignment == "distance":
        distance: Tensor = torch.linalg.vector_norm(backdoor - main)  # the slope at 0 is 0
        return distance
    return 1 - nn.functional.cosine_similarity(backdoor, main, dim=0)
