"""Neurotoxin: a backdoor in the parameters that benign clients hardly change.

Z. Zhang, A. Panda, L. Song, Y. Yang, M. W. Mahoney, P. Mittal, K. Ramchandran and J. E. Gonzalez,
"Neurotoxin: Durable Backdoors in Federated Learning", ICML 2022, arXiv 2206.10341. With g, the
gradient of the loss of clean samples at w^t, and the mask m of the share ``ratio`` of the
coordinates with the smallest |g|::

    w ← w − η · (m ∘ ∇ loss of clean samples and samples with the trigger)

Benign updates are small in these coordinates, so that they hardly erase the backdoor after the
attack ends. In the authors' code, the mask zeroes gradients only: momentum and weight decay act on
all coordinates. Its weight decay of attackers is 0.005; here it is 0 by default.

The paper takes g from the last observed change of the global model, w^t − w^s for the attackers'
round s before (``mask: observed``). The authors' code computes it on clean samples
(``mask: gradient``). In the attackers' first round there is no change, and g is the gradient. Each
of several global models has its own change.

Departs from the authors' code: the clean samples are the attacker's own, not those of 30 random
clients. Ties of |g| go to the lower coordinate. Parameters that clients keep to themselves are not
masked, and not ranked.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from pl_fed.arguments import check_choice, check_shares
from pl_fed.attacks.base import Attack
from pl_fed.attacks.own_training import (
    AttackerTraining,
    count_minibatches,
    cross_entropy,
    flat_gradient,
    select_samples,
)
from pl_fed.attacks.training_attack import TrainingAttack
from pl_fed.nets.modes import training_mode
from pl_fed.types import RoundContext

_MODEL = "last_broadcast"  # the name of a global model in the state


class Neurotoxin(TrainingAttack):
    """Neurotoxin: attackers train a backdoor only where benign gradients are small.

    Args:
        backdoor: The attack on data that adds the trigger: see :class:`TrainingAttack`.
        ratio: Share of the coordinates that attackers train, in (0, 1]; 1 is the plain backdoor.
        mask: The vector that ranks the coordinates: the ``"gradient"`` of clean samples, or the
            last ``"observed"`` change of the global model.
        per_tensor: Whether each parameter tensor is ranked by itself, instead of all together.
        epochs: Passes of an attacker over its samples, at least 1.
        steps: Minibatch steps instead of passes; ``None`` takes ``epochs``.
        batch_size: Largest number of samples in a minibatch.
        lr: Learning rate, above 0.
        momentum: Momentum, at least 0.
        weight_decay: Weight decay, at least 0. It also moves masked coordinates.

    Shape:
        - ``honest``: [h, d]; not read.
        - ``own``: [b, d].
        - output: [b, d].

    Raises:
        ValueError: If an argument is out of range; on use, if the mask leaves no coordinate.

    Example:
        >>> g = torch.tensor([0.5, -0.1, 0.02, -0.9, 0.3, 0.04, -0.6, 0.2, 0.01, -0.05])
        >>> smallest_mask(g, ratio=0.7).int().tolist()
        [0, 1, 1, 0, 1, 1, 0, 1, 1, 1]
        >>> Neurotoxin(ratio=0.9).ratio
        0.9
    """

    def __init__(
        self,
        backdoor: Attack | None = None,
        ratio: float = 0.95,
        mask: Literal["gradient", "observed"] = "gradient",
        per_tensor: bool = False,
        epochs: int = 5,
        steps: int | None = None,
        batch_size: int = 32,
        lr: float = 0.05,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(backdoor, epochs, steps, batch_size, lr, momentum, weight_decay)
        check_shares(ratio=ratio)
        if not ratio:
            raise ValueError(
                "Expected argument `ratio` to be above 0 but got 0, which trains nothing: set, for"
                " example, 0.95."
            )
        check_choice(("gradient", "observed"), mask=mask)
        self.ratio = ratio
        self.mask = mask
        self.per_tensor = per_tensor
        self._last_broadcasts: dict[int, Tensor] = {}  # w^s of the attackers' last round, by center
        self._change: Tensor | None = None  # w^t − w^s
        self._masks: list[Tensor] = []

    def prepare_round(self, attackers: list[int], context: RoundContext) -> None:
        """Compute the change of the global model since the attackers' last round."""
        if self.mask == "observed":
            before = self._last_broadcasts.get(context.center)
            now = context.broadcast.detach().clone()
            self._change = None if before is None else now - before.to(now)
            self._last_broadcasts[context.center] = now

    def begin_training(self, training: AttackerTraining) -> None:
        """Compute the mask of an attacker's gradients."""
        ranked = self._change
        if ranked is None:
            ranked = sum_gradients(training, self.batch_size)
        sizes = [parameter.numel() for parameter in training.parameters.values()]
        pieces = sizes if self.per_tensor else [sum(sizes)]
        masks = [
            _mask_sent(row, sent, self.ratio)
            for row, sent in zip(ranked.split(pieces), training.sent.split(pieces))
        ]
        trained = torch.cat(masks)
        if not bool((trained & training.sent).any()):
            raise ValueError(
                "Expected argument `ratio` of Neurotoxin to leave a coordinate to train but got"
                f" {self.ratio} of {int(training.sent.sum())} parameters: set, for example, 0.95."
            )
        parameters = training.parameters.values()
        self._masks = [
            part.view_as(parameter) for part, parameter in zip(trained.split(sizes), parameters)
        ]

    def change_gradients(self, training: AttackerTraining) -> None:
        """Set the gradients of masked coordinates to 0."""
        for parameter, mask in zip(training.parameters.values(), self._masks):
            if parameter.grad is not None:
                parameter.grad.mul_(mask)

    def state_dict(self) -> dict[str, Any]:
        """Return the last observed global models, and the state of the base class."""
        models = {f"{_MODEL}.{center}": row for center, row in self._last_broadcasts.items()}
        return {**super().state_dict(), **models}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the last observed global models, and the state of the base class."""
        models = {name: row for name, row in state.items() if name.partition(".")[0] == _MODEL}
        self._last_broadcasts = {
            int(name.partition(".")[2] or 0): row for name, row in models.items()
        }
        super().load_state_dict({n: value for n, value in state.items() if n not in models})


def smallest_mask(row: Tensor, ratio: float) -> Tensor:
    """Return a mask of the int(ratio · d) coordinates with the smallest absolute values, bool [d].

    Ties go to the lower coordinate.

    Args:
        row: Shape [d].
        ratio: Share of the coordinates, in [0, 1].
    """
    mask = torch.zeros(len(row), dtype=torch.bool, device=row.device)
    count = int(ratio * len(row) + 1e-9)
    mask[row.abs().sort(stable=True).indices[:count]] = True
    return mask


def sum_gradients(training: AttackerTraining, batch_size: int) -> Tensor:
    """Return the sum of the minibatches' gradients of the clean loss at w^t, [d].

    The net is in training mode; its running statistics are restored.
    """
    parts = torch.arange(training.clean.size).tensor_split(
        count_minibatches(training.clean.size, batch_size)
    )
    parameters = list(training.parameters.values())
    total = torch.zeros_like(training.start)
    with training_mode(training.net):
        for part in parts:
            loss = cross_entropy(training.net, select_samples(training.clean, part))
            total += flat_gradient(loss, parameters)
    return total


def _mask_sent(row: Tensor, sent: Tensor, ratio: float) -> Tensor:
    """Return the mask of a part of the coordinates; unsent ones are true and not ranked."""
    mask = torch.ones_like(sent)
    mask[sent] = smallest_mask(row[sent], ratio)
    return mask
