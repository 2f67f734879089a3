"""The probability simplex: weights of at least 0 with sum 1."""

import torch
from torch import Tensor


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
