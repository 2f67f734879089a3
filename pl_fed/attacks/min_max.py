"""Min-max: the largest change that stays within the largest distance between honest uploads.

V. Shejwalkar and A. Houmansadr, "Manipulating the Byzantine: Optimizing Model Poisoning Attacks and
Defenses for Federated Learning", NDSS 2021 (the AGR-agnostic attack min-max)::

    Δ_k = m + γ · p,   the largest γ with   max_i ‖Δ_k − x_i‖ ≤ max_ij ‖x_i − x_j‖

x_i are the uploads that the attackers know, m is their mean, and p is the perturbation. It is the
negative standard deviation of the x_i, the negative signs of m, or the negative unit vector of m.
The length of p does not matter, because γ compensates for it.

Departs from the paper: the paper finds γ by bisection; pl_fed solves for γ. With D the largest
distance between two x_i, ‖m + γ p − x_i‖² ≤ D² is a quadratic inequality in γ for each i. γ is the
smallest of their larger roots.
"""

from typing import Literal

import torch
from torch import Tensor

from pl_fed.arguments import check_choice
from pl_fed.attacks.line_attack import LineAttack
from pl_fed.functional.aggregation import gram_matrix, inner_products, squared_distances
from pl_fed.functional.forging import mean_row, perturbation_of
from pl_fed.types import RoundContext

Perturbation = Literal["std", "sign", "unit"]


class MinMax(LineAttack):
    """Min-max: the upload furthest from the mean, within the largest distance between two uploads.

    No known upload is further from the forged one than the two most distant known uploads are from
    each other. All attackers send the same upload.

    Args:
        perturbation: The direction p: ``"std"``, the negative standard deviation; ``"sign"``, the
            negative signs of the mean; ``"unit"``, the negative mean.

    Shape:
        - ``honest``: [h, d].
        - ``own``: [b, d].
        - output: [b, d].

    Raises:
        ValueError: If ``perturbation`` is not one of these.

    Example:
        >>> honest, own = torch.tensor([[1.0], [2.0], [6.0]]), torch.zeros(1, 1)
        >>> MinMax().forge(honest, own, RoundContext())  # 5 away from 6
        tensor([[1.]])
    """

    def __init__(self, perturbation: Perturbation = "std") -> None:
        super().__init__(factor=None)
        check_choice(("std", "sign", "unit"), perturbation=perturbation)
        self.perturbation = perturbation

    def line(self, reference: Tensor, own: Tensor, context: RoundContext) -> tuple[Tensor, Tensor]:
        """Return m and p."""
        mean = mean_row(reference)
        return mean, perturbation_of(self.perturbation, reference, mean)

    def default_factor(
        self, reference: Tensor, centre: Tensor, direction: Tensor, context: RoundContext
    ) -> float:
        """Return the largest γ within the bound."""
        products = gram_matrix(reference, centre=centre)
        slopes = -inner_products(reference, direction, centre)
        square = direction.double().square().sum()
        squared_radii, distances = products.diagonal(), squared_distances(products)
        return self.largest_factor(square, slopes, squared_radii, distances)

    def largest_factor(
        self, square: Tensor, slopes: Tensor, squared_radii: Tensor, distances: Tensor
    ) -> float:
        """Return the largest γ with ‖m + γ p − x_i‖² ≤ max_ij ‖x_i − x_j‖² for all i.

        Args:
            square: ‖p‖².
            slopes: p · (m − x_i) [h].
            squared_radii: ‖m − x_i‖² [h].
            distances: ‖x_i − x_j‖² [h, h].
        """
        return float(larger_roots(square, slopes, distances.max() - squared_radii).min())


def larger_roots(square: Tensor, slopes: Tensor, bounds: Tensor) -> Tensor:
    """Return the larger root γ of square · γ² + 2 · slope · γ = bound, or 0 where there is none.

    Args:
        square: Not negative.
        slopes: Any numbers.
        bounds: Not negative, except for rounding errors.

    Example:
        >>> larger_roots(torch.tensor(1.0), torch.tensor([1.0, -1.0]), torch.tensor(3.0))
        tensor([1., 3.])
    """
    bounds = bounds.clamp(min=0)
    discriminant = (slopes.square() + square * bounds).sqrt()
    # two forms of the same root: each avoids the subtraction of nearly equal numbers for its signs
    roots = torch.where(
        slopes > 0, bounds / (slopes + discriminant), (discriminant - slopes) / square
    )
    return torch.where(roots.isfinite(), roots, 0.0)
