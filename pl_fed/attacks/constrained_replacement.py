"""Constrained replacement: a backdoored model near w^t takes the place of the global model.

E. Bagdasaryan, A. Veit, Y. Hua, D. Estrin and V. Shmatikov, "How To Backdoor Federated Learning",
AISTATS 2020, arXiv 1807.00459, section 4: constrain-and-scale and train-and-scale. With X, the
model that an attacker trains from w^t::

    L = α · CE + (1 − α) · L_anomaly,     L_anomaly = ‖X − w^t‖₂, or 1 − cos(X, w^t)
    Δ_k ← γ · (X − w^t)

Constrain-and-scale takes γ = n / (η b) for n clients in the cohort, of which b attack, and a server
step w^t + η · (mean of the uploads). The attackers' mean model then replaces w^t, once the benign
updates cancel. Train-and-scale takes γ = S / ‖X − w^t‖₂ for a server that refuses uploads longer
than S.

Departs from the paper: the paper stops training once the backdoor's loss is small; here the number
of passes is fixed. The paper leaves L_anomaly to the defence. In the authors' code it is the norm,
not squared, and turned off by α = 1. Running statistics are not scaled. The library FLPoison builds
the cosine without a gradient, so that it only rescales the cross-entropy; here it has one.
Parameters that clients keep to themselves do not count in L_anomaly.
"""

from typing import Literal

import torch
from torch import Tensor

from pl_fed.arguments import check_choice, check_positive, check_shares
from pl_fed.attacks.base import Attack
from pl_fed.attacks.own_training import AttackerTraining
from pl_fed.attacks.training_attack import TrainingAttack
from pl_fed.functional.aggregation import merging_dtype
from pl_fed.types import Batch


class ConstrainedReplacement(TrainingAttack):
    """Constrained replacement: attackers train near w^t and scale their uploads to replace it.

    Args:
        backdoor: The attack on data that adds the trigger: see :class:`TrainingAttack`.
        alpha: Weight α of the cross-entropy, in [0, 1]; 1 turns the constraint off.
        constraint: L_anomaly: the ``"norm"`` of the change, or the ``"cosine"`` distance of the
            models.
        scale: The factor γ, above 0; ``None`` takes n / (η b).
        norm_bound: The length S of all uploads, above 0, instead of a factor: train-and-scale.
            ``None`` for constrain-and-scale.
        server_lr: The server's learning rate η, above 0.
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
        ValueError: If an argument is out of range, or both ``scale`` and ``norm_bound`` are set.

    Example:
        >>> start, end = torch.tensor([1.0, 0.0]), torch.tensor([1.5, 1.0])
        >>> anomaly(end, start, "norm"), anomaly(end, start, "cosine")
        (tensor(1.1180), tensor(0.1679))
        >>> ConstrainedReplacement(norm_bound=2.0).norm_bound
        2.0
    """

    def __init__(
        self,
        backdoor: Attack | None = None,
        alpha: float = 0.7,
        constraint: Literal["norm", "cosine"] = "norm",
        scale: float | None = None,
        norm_bound: float | None = None,
        server_lr: float = 1.0,
        epochs: int = 5,
        steps: int | None = None,
        batch_size: int = 32,
        lr: float = 0.05,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(backdoor, epochs, steps, batch_size, lr, momentum, weight_decay)
        check_shares(alpha=alpha)
        check_choice(("norm", "cosine"), constraint=constraint)
        check_positive(server_lr=server_lr)
        if scale is not None:
            check_positive(scale=scale)
        if norm_bound is not None:
            check_positive(norm_bound=norm_bound)
        if scale is not None and norm_bound is not None:
            raise ValueError(
                "Expected only one of the arguments `scale` and `norm_bound` of"
                f" ConstrainedReplacement but got {scale} and {norm_bound}: set the other to null."
            )
        self.alpha = alpha
        self.constraint = constraint
        self.scale = scale
        self.norm_bound = norm_bound
        self.server_lr = server_lr

    def loss(self, training: AttackerTraining, batch: Batch) -> Tensor:
        """Return α · CE + (1 − α) · L_anomaly."""
        classification = super().loss(training, batch)
        if self.alpha == 1:
            return classification
        sent = training.sent
        distance = anomaly(training.row[sent], training.start[sent], self.constraint)
        return self.alpha * classification + (1 - self.alpha) * distance

    def make_upload(self, training: AttackerTraining, update: Tensor) -> Tensor:
        """Return γ times the change of the model."""
        wide = update.to(merging_dtype(update))
        context = training.context
        if self.norm_bound is not None:
            norm = torch.linalg.vector_norm(wide)
            return wide * (self.norm_bound / norm) if norm > 0 else wide
        if self.scale is not None:
            return wide * self.scale
        return wide * (len(context.clients) / (self.server_lr * len(context.attackers)))


def anomaly(row: Tensor, start: Tensor, constraint: str) -> Tensor:
    """Return the distance of a model from w^t, a scalar with a gradient.

    Args:
        row: The model, [d].
        start: w^t, [d].
        constraint: ``"norm"`` for ‖row − start‖₂ (its gradient at 0 is 0), or ``"cosine"`` for
            1 − cos(row, start).
    """
    if constraint == "norm":
        norm: Tensor = torch.linalg.vector_norm(row - start)
        return norm
    return 1 - torch.nn.functional.cosine_similarity(row, start, dim=0)
