"""Sign flipping.

The opposite of what an attacker would send, as in L. Li, W. Xu, T. Chen, G. B. Giannakis and
Q. Ling, "RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning from
Heterogeneous Datasets", AAAI 2019, arXiv 1811.03761; and section V-D of FLAME (S. Zhu et al., "On
ADMM in heterogeneous federated learning", arXiv 2407.16397)::

    u_k ← −|p| · u_k,   p ~ N(0, γ²)

where u_k is a model and γ² = 0.1: ``SignFlipping(factor=None, of="model")``. FLAME's code turns the
broadcast model round instead, with γ = 1: ``SignFlipping(factor=None, of="broadcast", std=1)``.

The library ByzFL calls the opposite of the honest uploads' mean so: see InnerProductManipulation.
"""

from typing import Literal

import torch
from torch import Tensor

from pl_fed.arguments import check_choice, check_nonnegative
from pl_fed.attacks.line_attack import Factor, LineAttack
from pl_fed.functional.aggregation import merging_dtype
from pl_fed.functional.forging import upload_origin
from pl_fed.random import key, normals
from pl_fed.types import RoundContext


class SignFlipping(LineAttack):
    """Upload the opposite of what one would send.

    Args:
        factor: By how much it is multiplied, apart from the sign; ``None`` for |p|, p being drawn
            from N(0, std²) for each attacker in each round; or ``"search"``: see
            :class:`LineAttack`.
        of: What is turned round: the ``"update"``, the ``"model"``, which is the broadcast one and
            the update, or the ``"broadcast"`` model alone. A model that is forged is sent by its
            difference from the broadcast one.
        std: Standard deviation of p, at least 0; by default FLAME's, whose variance is 0.1.
        trials: How often a search runs the defence.

    Shape:
        - ``honest``: [h, d]; not read, but by a search.
        - ``own``: [b, d].
        - output: [b, d].

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> context = RoundContext(broadcast=torch.tensor([1.0]))
        >>> honest, own = torch.zeros(2, 1), torch.tensor([[3.0]])
        >>> SignFlipping().forge(honest, own, context)
        tensor([[-3.]])
        >>> SignFlipping(of="model").forge(honest, own, context)  # 4 becomes −4
        tensor([[-5.]])
    """

    def __init__(
        self,
        factor: Factor | None = 1.0,
        of: Literal["update", "model", "broadcast"] = "update",
        std: float = 0.1**0.5,
        trials: int = 20,
    ) -> None:
        super().__init__(factor, trials)
        check_choice(("update", "model", "broadcast"), of=of)
        check_nonnegative(std=std)
        self.of = of
        self.std = std

    def line(self, known: Tensor, own: Tensor, context: RoundContext) -> tuple[Tensor, Tensor]:
        """Return what is subtracted from a model, and the opposite of what would be sent."""
        start = upload_origin("update" if self.of == "update" else "model", own, context.broadcast)
        if self.of == "broadcast":
            return -start, -start.expand(own.shape)
        return -start, -(own.to(merging_dtype(own)) + start)

    def usual_factor(
        self, known: Tensor, centre: Tensor, direction: Tensor, context: RoundContext
    ) -> Tensor:
        """Return |p| for each attacker."""
        draws = [
            normals(
                key(context.seed, "sign-flipping", context.round, client), torch.zeros(1).long()
            )
            for client in self.attacker_ids(direction, context)
        ]
        return self.std * torch.stack(draws).abs().to(direction)
