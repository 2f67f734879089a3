"""Min-sum: the largest change that stays within the largest total distance of an honest upload.

V. Shejwalkar and A. Houmansadr, "Manipulating the Byzantine: Optimizing Model Poisoning Attacks and
Defenses for Federated Learning", NDSS 2021 (the AGR-agnostic attack min-sum)::

    Δ_k = m + γ · p,   the largest γ with   Σ_i ‖Δ_k − x_i‖² ≤ max_i Σ_j ‖x_i − x_j‖²

x_i are the uploads that the attackers know, m is their mean, and p is the perturbation of min-max.

Departs from the paper: the paper finds γ by bisection; pl_fed solves for γ. As Σ_i (x_i − m) = 0,
the inequality gives γ = max_i ‖x_i − m‖ / ‖p‖. The authors' code takes the smallest sum, min_i,
instead of the largest one.
"""

from torch import Tensor

from pl_fed.attacks.min_max import MinMax, larger_roots


class MinSum(MinMax):
    """Min-sum: the upload furthest from the mean, within the largest sum of squared distances.

    The sum of its squared distances to the known uploads is at most the largest such sum of a known
    upload. All attackers send the same upload.

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
        >>> import torch
        >>> from pl_fed.types import RoundContext
        >>> honest, own = torch.tensor([[1.0], [2.0], [6.0]]), torch.zeros(1, 1)
        >>> MinSum().forge(honest, own, RoundContext())  # as far from 3 as 6 is
        tensor([[0.]])
    """

    def largest_factor(
        self, square: Tensor, slopes: Tensor, squared_radii: Tensor, distances: Tensor
    ) -> float:
        """Return the largest γ with Σ_i ‖m + γ p − x_i‖² ≤ max_i Σ_j ‖x_i − x_j‖²."""
        bound = distances.sum(1).max() - squared_radii.sum()
        return float(larger_roots(square * len(squared_radii), slopes.sum(), bound))
