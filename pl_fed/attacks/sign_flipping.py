"""Sign flipping: each attacker sends a negative multiple of its own upload or model.

L. Li, W. Xu, T. Chen, G. B. Giannakis and Q. Ling, "RSA: Byzantine-Robust Stochastic Aggregation
Methods for Distributed Learning from Heterogeneous Datasets", AAAI 2019, arXiv 1811.03761; and
section V-D of FLAME (S. Zhu et al., "On ADMM in heterogeneous federated learning", arXiv
2407.16397)::

    u_k ← −|p| · u_k,   p ~ N(0, γ²)

where u_k is a model and γ² = 0.1: ``SignFlipping(factor=None, of="model")``. FLAME's code flips the
broadcast model instead, with γ = 1: ``SignFlipping(factor=None, of="broadcast", std=1)``.

The sign flipping of the library ByzFL is the negative mean of the honest uploads: use
``InnerProductManipulation`` for that.
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
    """Sign flipping: each attacker multiplies its own update or model by a negative number.

    Args:
        factor: Absolute value of the number. ``None`` takes ``|p|``, with p drawn from N(0, std²)
            for each attacker in each round. ``"search"`` searches for the factor that does most
            harm: see :class:`LineAttack`.
        of: The vector to flip: the ``"update"``; the ``"model"``, which is the broadcast plus the
            update; or the ``"broadcast"`` alone. The upload of a model is its difference from the
            broadcast.
        std: Standard deviation of p, at least 0; by default √0.1, as in FLAME's paper.
        trials: Number of runs of the defence in a search, at least 1.

    Shape:
        - ``honest``: [h, d]; only a search reads it.
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

    def line(self, reference: Tensor, own: Tensor, context: RoundContext) -> tuple[Tensor, Tensor]:
        """Return the negative origin of uploads, and the negative vector to flip."""
        target = "update" if self.of == "update" else "model"
        origin = upload_origin(target, own, context.broadcast)
        if self.of == "broadcast":
            return -origin, -origin.expand(own.shape)
        return -origin, -(own.to(merging_dtype(own)) + origin)

    def default_factor(
        self, reference: Tensor, centre: Tensor, direction: Tensor, context: RoundContext
    ) -> Tensor:
        """Return ``|p|`` for each attacker."""
        draws = [
            normals(
                key(context.seed, "sign-flipping", context.round, client), torch.zeros(1).long()
            )
            for client in self.attacker_ids(direction, context)
        ]
        return self.std * torch.stack(draws).abs().to(direction)
