"""Random updates, or Gaussian attacks.

T. Li, S. Hu, A. Beirami and V. Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, arXiv 2012.04221, attack A2 (after X. Xu and L. Lyu, arXiv
2011.10464)::

    Δ_k ~ N(0, s² I)

In Ditto's code s is the standard deviation over all coordinates of the client's own upload, which
comes from training on random labels: combine it with RandomLabels.

FLAME (S. Zhu et al., "On ADMM in heterogeneous federated learning", arXiv 2407.16397, section V-D,
Gaussian attacks) draws the model that is sent, from N(0, γ² I) with γ² = 0.1:
``RandomUpdates(std=0.1**0.5, on="model")``; its code has γ = 1.
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
    """Send an update, or a model, of normal random numbers.

    Args:
        std: Their standard deviation s, at least 0; ``None`` for that over all coordinates of what
            they take the place of, each attacker's own, with the number of coordinates below the
            fraction bar.
        on: Whether these are the numbers of the ``"update"``, or of the ``"model"``, which is sent
            by its difference from the broadcast one.

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
        check_nonnegative(std=std)
        check_choice(("update", "model"), on=on)
        self.std = std
        self.on = on

    def forge(self, honest: Tensor, own: Tensor, context: RoundContext) -> Tensor:
        """Return draws by (seed, round, attacker), torch's own, on the CPU."""
        start = upload_origin(self.on, own, context.broadcast)
        forged, drawn = torch.empty_like(own), torch.empty(len(start))
        for row, mine, client in zip(forged, own, self.attacker_ids(own, context)):
            std = (mine + start).std(correction=0) if self.std is None else self.std
            draw = generator(context.seed, "random-updates", context.round, client)
            torch.randn(len(row), generator=draw, out=drawn)
            torch.sub(drawn.to(row.device).mul_(std), start, out=row)
        return forged
