"""Min-max.

V. Shejwalkar and A. Houmansadr, "Manipulating the Byzantine: Optimizing Model Poisoning Attacks and
Defenses for Federated Learning", NDSS 2021 (the AGR-agnostic attack min-max)::

    Δ_k = m + γ · p,   the largest γ with   max_i ‖Δ_k − x_i‖ ≤ max_ij ‖x_i − x_j‖

x_i are the uploads that the attackers know, m is their mean, and p the perturbation: the opposite
of their standard deviation, of the signs of m, or of m as a unit vector. How long p is does not
matter: γ makes up for it.

Departs from the paper: it halves its way to γ; here γ is solved for. ‖m + γ p − x_i‖² ≤ D² is a
quadratic inequality in γ for each i, and γ the smallest of the larger roots.
"""

from typing import Literal

import torch
from torch import Tensor

from pl_fed.arguments import check_choice
from pl_fed.attacks.line_attack import LineAttack
from pl_fed.functional.aggregation import gram_matrix, inner_products, squared_distances
from pl_fed.functional.forging import mean_row, standard_deviations
from pl_fed.types import RoundContext

Perturbation = Literal["std", "sign", "unit"]


class MinMax(LineAttack):
    """Upload what is as far off as it can be and no further from any upload than two of them are.

    All attackers upload the same.

    Args:
        perturbation: What p is: ``"std"``, ``"sign"`` or ``"unit"``.

    Shape:
        - ``honest``: [h, d].
        - ``own``: [b, d].
        - output: [b, d].

    Raises:
        ValueError: If ``perturbation`` is none of these.

    Example:
        >>> honest, own = torch.tensor([[1.0], [2.0], [6.0]]), torch.zeros(1, 1)
        >>> MinMax().forge(honest, own, RoundContext())  # 5 away from 6
        tensor([[1.]])
    """

    def __init__(self, perturbation: Perturbation = "std") -> None:
        super().__init__(factor=None)
        check_choice(("std", "sign", "unit"), perturbation=perturbation)
        self.perturbation = perturbation

    def line(self, known: Tensor, own: Tensor, context: RoundContext) -> tuple[Tensor, Tensor]:
        """Return m and p."""
        mean = mean_row(known)
        if self.perturbation == "std":
            return mean, -standard_deviations(known, mean)
        return mean, -(mean.sign() if self.perturbation == "sign" else mean)

    def usual_factor(
        self, known: Tensor, centre: Tensor, direction: Tensor, context: RoundContext
    ) -> float:
        """Return the largest γ that is within the bound."""
        products = gram_matrix(known, centre=centre)
        slopes = -inner_products(known, direction, centre)
        square = direction.double().square().sum()
        return self.largest(square, slopes, products.diagonal(), squared_distances(products))

    def largest(self, square: Tensor, slopes: Tensor, starts: Tensor, distances: Tensor) -> float:
        """Return the largest γ such that none of the squared distances is above the largest.

        Args:
            square: ‖p‖².
            slopes: p · (m − x_i) [h].
            starts: ‖m − x_i‖² [h].
            distances: ‖x_i − x_j‖² [h, h].
        """
        return float(larger_roots(square, slopes, distances.max() - starts).min())


def larger_roots(square: Tensor, slopes: Tensor, room: Tensor) -> Tensor:
    """Return the larger root γ of square · γ² + 2 · slope · γ = room, or 0 where there is none.

    Args:
        square: Not negative.
        slopes: Any numbers.
        room: Negative by rounding at most.

    Example:
        >>> larger_roots(torch.tensor(1.0), torch.tensor([1.0, -1.0]), torch.tensor(3.0))
        tensor([1., 3.])
    """
    room = room.clamp(min=0)
    root = (slopes.square() + square * room).sqrt()
    # two forms of the same, of which one does not subtract what is nearly equal
    found = torch.where(slopes > 0, room / (slopes + root), (root - slopes) / square)
    return torch.where(found.isfinite(), found, 0.0)
