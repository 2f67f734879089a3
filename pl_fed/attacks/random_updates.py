"""Random updates, also called Gaussian attacks: each attacker sends normal random numbers.

T. Li, S. Hu, A. Beirami and V. Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, arXiv 2012.04221, attack A2 (after X. Xu and L. Lyu, arXiv
2011.10464)::

    Δ_k ~ N(0, s² I)

In Ditto's code, s is the standard deviation over all coordinates of the attacker's own upload, and
the attackers train on random labels: use ``Combined`` with ``RandomLabels`` for that.

FLAME (S. Zhu et al., "On ADMM in heterogeneous federated learning", arXiv 2407.16397, section V-D,
Gaussian attacks) draws the forged model from N(0, γ² I) with γ² = 0.1:
``RandomUpdates(std=0.1**0.5, on="model")``. FLAME's code has γ = 1.
"""

from typing import Literal

import torch
from torch import Tensor

from pl_fed.arguments import check_choice, check_nonnegative
from pl_fed.attacks.base import Attack
from pl_fed.functional.forging import upload_origin
from pl_fed.random import generator
from pl_fed.types import RoundContext


class RandomUpdates(Attack):
    """Random updates: uploads of normal random numbers.

    Args:
        std: Standard deviation s of the numbers, at least 0. ``None`` takes the population standard
            deviation over all numbers of the attacker's own update or model (see ``on``) that
            clients send.
        on: The vector of random numbers: the ``"update"``, or the ``"model"``. The upload of a
            model is its difference from the broadcast.

    Shape:
        - ``honest``: [h, d]; not read.
        - ``own``: [b, d].
        - output: [b, d].

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> context = RoundContext(attackers=torch.tensor([4]))
        >>> honest, own = torch.zeros(2, 3), torch.tensor([[1.0, 1.0, 4.0]])
        >>> RandomUpdates().forge(honest, own, context)  # s = √2
        tensor([[1.6687, 2.6710, 0.8312]])
    """

    def __init__(self, std: float | None = None, on: Literal["update", "model"] = "update") -> None:
        if std is not None:
            check_nonnegative(std=std)
        check_choice(("update", "model"), on=on)
        self.std = std
        self.on = on

    def forge(self, honest: Tensor, own: Tensor, context: RoundContext) -> Tensor:
        """Return draws of torch's CPU generator, keyed by (seed, round, attacker)."""
        origin = upload_origin(self.on, own, context.broadcast)
        forged, numbers = torch.empty_like(own), torch.empty(len(origin))
        for row, own_row, client in zip(forged, own, self.attacker_ids(own, context)):
            sent = context.select_sent(own_row + origin)
            std = sent.std(correction=0) if self.std is None else self.std
            draws = generator(context.seed, "random-updates", context.round, client)
            torch.randn(len(row), generator=draws, out=numbers)
            torch.sub(numbers.to(row.device).mul_(std), origin, out=row)
        return forged
