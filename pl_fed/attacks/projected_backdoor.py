"""Projected backdoor: attackers train in a ball around w^t, by projected gradient descent.

H. Wang, K. Sreenivasan, S. Rajput, H. Vishwakarma, S. Agarwal, J. Sohn, K. Lee and D.
Papailiopoulos, "Attack of the Tails: Yes, You Really Can Backdoor Federated Learning", NeurIPS
2020, arXiv 2007.05084. After every few steps, and at the end of each pass::

    w ← w^t + ε (w − w^t) / ‖w − w^t‖₂              if ‖w − w^t‖₂ > ε        (l2)
    w ← each coordinate clamped to [w^t − ε, w^t + ε]                         (linf)

so that the upload is not longer than ε. A server that clips by norms then takes it as it is. The
authors shrink the radius against Krum, ε · γ^t in round t (``shrinkage``). For their edge-case
samples, set ``backdoor``; for their model replacement, put ``ModelReplacement`` behind this attack
in ``Combined``.

Departs from the authors' code: with the l∞ norm, it trains by plain steps with a learning rate of
0.001; here the optimizer is the same. Running statistics, and parameters that clients keep to
themselves, are not projected. The last step is always followed by a projection. Steps are
counted over all passes; in the code, each pass counts anew.
"""

from typing import Literal

import torch
from torch import Tensor

from pl_fed.arguments import check_choice, check_integers, check_positive, check_shares
from pl_fed.attacks.base import Attack
from pl_fed.attacks.own_training import AttackerTraining
from pl_fed.attacks.training_attack import TrainingAttack


class ProjectedBackdoor(TrainingAttack):
    """Projected backdoor: attackers train a backdoor within a distance of w^t.

    Args:
        backdoor: The attack on data that adds the trigger: see :class:`TrainingAttack`.
        radius: ε, above 0.
        norm: The norm of the ball, ``"l2"`` or ``"linf"``.
        every: Steps between two projections, at least 1; a pass always ends with one.
        shrinkage: γ: the radius in round t is ε · γ^t, in (0, 1].
        epochs: Passes of an attacker over its samples, at least 1.
        steps: Minibatch steps instead of passes; ``None`` takes ``epochs``.
        batch_size: Largest number of samples in a minibatch.
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
        >>> start, row = torch.tensor([1.0, 1.0]), torch.tensor([4.0, 5.0])
        >>> project(row, start, 2.0, "l2"), project(row, start, 2.0, "linf")
        (tensor([2.2000, 2.6000]), tensor([3., 3.]))
        >>> ProjectedBackdoor(radius=2.0).radius
        2.0
    """

    def __init__(
        self,
        backdoor: Attack | None = None,
        radius: float = 2.0,
        norm: Literal["l2", "linf"] = "l2",
        every: int = 10,
        shrinkage: float = 1.0,
        epochs: int = 5,
        steps: int | None = None,
        batch_size: int = 32,
        lr: float = 0.05,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(backdoor, epochs, steps, batch_size, lr, momentum, weight_decay)
        check_choice(("l2", "linf"), norm=norm)
        check_integers(1, every=every)
        check_positive(radius=radius, shrinkage=shrinkage)
        check_shares(shrinkage=shrinkage)
        self.radius = radius
        self.norm = norm
        self.every = every
        self.shrinkage = shrinkage

    def end_step(self, training: AttackerTraining) -> None:
        """Project the model, every few steps and at the end of a pass."""
        if training.step % self.every and not training.ends_pass:
            return
        radius = self.radius * self.shrinkage**training.context.round
        row, sent = training.row.detach(), training.sent
        row[sent] = project(row[sent], training.start[sent], radius, self.norm)
        training.write_row(row)


def project(row: Tensor, start: Tensor, radius: float, norm: str) -> Tensor:
    """Return the point of a ball around ``start`` that is closest to ``row``, [d].

    Args:
        row: The point, [d].
        start: The centre of the ball, [d].
        radius: The radius of the ball, above 0.
        norm: ``"l2"`` or ``"linf"``.
    """
    change = row - start
    if norm == "linf":
        return start + change.clamp(-radius, radius)
    length = torch.linalg.vector_norm(change)
    return start + change * (radius / length) if length > radius else row
