"""Same value: each attacker sends a model with one value in all coordinates.

L. Li, W. Xu, T. Chen, G. B. Giannakis and Q. Ling, "RSA: Byzantine-Robust Stochastic Aggregation
Methods for Distributed Learning from Heterogeneous Datasets", AAAI 2019, arXiv 1811.03761, and
section V-D of FLAME (S. Zhu et al., "On ADMM in heterogeneous federated learning", arXiv
2407.16397)::

    u_k = p · (1, ..., 1),   p a constant (RSA) or ~ N(0, γ²) (FLAME, γ² = 0.1)

where u_k is the forged model. FLAME's code has γ = 0.01: ``SameValue(std=0.01)``. As here, it draws
one p for each attacker in each round.
"""

from typing import Literal

import torch
from torch import Tensor

from pl_fed.arguments import check_choice, check_finite, check_nonnegative
from pl_fed.attacks.base import Attack
from pl_fed.functional.forging import upload_origin
from pl_fed.random import key, normals
from pl_fed.types import RoundContext


class SameValue(Attack):
    """Same value: a forged model, or update, with one value in all coordinates.

    Args:
        value: The value; ``None`` draws it from N(0, std²) for each attacker in each round.
        std: Standard deviation of the draw, at least 0; by default √0.1, as in FLAME's paper.
        on: The vector with the value: the ``"model"``, or the ``"update"``. The upload of a model
            is its difference from the broadcast.

    Shape:
        - ``honest``: [h, d]; not read.
        - ``own``: [b, d]; not read.
        - output: [b, d].

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> context = RoundContext(attackers=torch.tensor([4]), broadcast=torch.tensor([1.0, 2.0]))
        >>> SameValue(value=5.0).forge(torch.zeros(2, 2), torch.zeros(1, 2), context)
        tensor([[4., 3.]])
    """

    def __init__(
        self,
        value: float | None = None,
        std: float = 0.1**0.5,
        on: Literal["update", "model"] = "model",
    ) -> None:
        check_finite(value=value)
        check_nonnegative(std=std)
        check_choice(("update", "model"), on=on)
        self.value = value
        self.std = std
        self.on = on

    def forge(self, honest: Tensor, own: Tensor, context: RoundContext) -> Tensor:
        """Return the value in all coordinates, less the broadcast if it is a model's value."""
        origin = upload_origin(self.on, own, context.broadcast)
        forged = origin.new_empty(own.shape)
        for row, client in zip(forged, self.attacker_ids(own, context)):
            value = self.value
            if value is None:
                draw = key(context.seed, "same-value", context.round, client)
                value = self.std * float(normals(draw, torch.zeros(1, dtype=torch.int64)))
            row.copy_(value - origin)
        return forged.to(own.dtype)
