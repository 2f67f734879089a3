"""The probability simplex: weights of at least 0 with sum 1."""

import torch
from torch import Tensor

from pl_fed.functional.min_norm import min_norm_weights


def project_onto_simplex(values: Tensor) -> Tensor:
    """Return the point of the probability simplex nearest to some values.

    J. Duchi, S. Shalev-Shwartz, Y. Singer and T. Chandra, "Efficient projections onto the l1-ball
    for learning in high dimensions", ICML 2008, Figure 1: the point is max(values − θ, 0), with the
    θ that gives sum 1.

    Args:
        values: Finite, shape [n], n at least 1.

    Returns:
        Shape [n], at least 0, with sum 1, in float64.

    Example:
        >>> project_onto_simplex(torch.tensor([0.5, 0.75, 1.25]))
        tensor([0.0000, 0.2500, 0.7500], dtype=torch.float64)
    """
    values = values.double()
    values = values - values.max()  # θ keeps its digits beside large values
    ordered = values.sort(descending=True).values
    counts = torch.arange(1, len(values) + 1, dtype=torch.float64, device=values.device)
    thresholds = (ordered.cumsum(0) - 1) / counts
    positive = ordered > thresholds  # a prefix, which has the first one
    return (values - thresholds[positive.sum() - 1]).clamp(min=0)


def minimize_on_simplex(quadratic: Tensor, linear: Tensor) -> Tensor:
    """Return the point p of the simplex with the smallest linear · p + pᵀ quadratic p / 2.

    As the sum of p is 1, the linear part and any constant become quadratic ones: the point has the
    smallest pᵀ (quadratic + linear 1ᵀ + 1 linearᵀ + c 1 1ᵀ) p, whose matrix is positive definite
    with c = ‖linear‖² / (smallest eigenvalue of quadratic).

    Args:
        quadratic: Symmetric and positive definite, float64 [n, n].
        linear: Shape [n].

    Returns:
        Shape [n], at least 0, with sum 1.

    Example:
        >>> quadratic = torch.eye(2, dtype=torch.float64)
        >>> minimize_on_simplex(quadratic, torch.tensor([0.0, 0.5], dtype=torch.float64))
        tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    linear = linear - linear.mean()  # a constant on the simplex
    smallest = torch.linalg.eigvalsh(quadratic)[0]
    products = quadratic + linear[:, None] + linear + linear @ linear / smallest
    return min_norm_weights(products, 0.0, 1.0)
