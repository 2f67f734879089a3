"""The shortest convex combination of vectors: a small quadratic program."""

import torch
from torch import Tensor

_TOLERANCE = 1e-14  # of a gradient's differences, by vector, for products of at most 1


def min_norm_weights(products: Tensor, low: float, high: float) -> Tensor:
    """Return the weights of the shortest weighted mean of vectors, from their Gram matrix.

    The weights minimise ``weightsᵀ products weights`` over weights in [low, high] with sum 1. The
    active-set method (J. Nocedal and S. J. Wright, "Numerical Optimization", 2nd edition, Algorithm
    16.3) starts from equal weights. Weights are fixed at a bound, or free. A pass looks for the
    shortest mean over the free weights. If a free weight meets a bound on the way, it is fixed
    there. If the pass reaches the minimum, the fixed weight with the largest gain becomes free.

    Args:
        products: The Gram matrix, symmetric, float64 [n, n]. It may be singular.
        low: The lower bound, at most 1/n.
        high: The upper bound, at least 1/n.

    Returns:
        The weights, shape [n].

    Example:
        >>> vectors = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> min_norm_weights(vectors @ vectors.T, low=0.0, high=1.0)
        tensor([0.2000, 0.8000], dtype=torch.float64)
    """
    n, device = len(products), products.device
    products = products.cpu()
    products = products / products.abs().max().clamp(min=torch.finfo(products.dtype).tiny)
    weights = products.new_full((n,), 1 / n)
    free = torch.full((n,), low < high)
    for _ in range(10 * n if low < high else 0):  # n passes, as a rule
        positions = free.nonzero()[:, 0]
        gradient = products @ weights
        step = _compute_step(products[positions][:, positions], gradient[positions])
        room = torch.where(step > 0, high - weights[positions], weights[positions] - low)
        reach = torch.where(step == 0, torch.inf, room / step.abs())
        first = int(reach.argmin())
        if reach[first] < 1:
            weights[positions] = (weights[positions] + reach[first] * step).clamp(low, high)
            weights[positions[first]] = high if step[first] > 0 else low
            free[positions[first]] = False
            continue
        weights[positions] += step
        gradient = products @ weights
        gain = gradient - gradient[positions].mean()  # of less weight; of more at the lower bound
        gain = torch.where(weights <= low, -gain, gain).masked_fill(free, -torch.inf)
        if gain.max() <= _TOLERANCE * n:
            break
        free[gain.argmax()] = True
    return weights.to(device)


def _compute_step(products: Tensor, gradient: Tensor) -> Tensor:
    """Return the step of sum 0 that makes the gradient equal in all coordinates."""
    n = len(products)
    if n == 1:
        return torch.zeros_like(gradient)
    system = products.new_zeros(n + 1, n + 1)
    system[:n, :n], system[n, :n], system[:n, n] = products, 1, 1
    right = torch.cat([-gradient, gradient.new_zeros(1)])
    solution: Tensor = torch.linalg.lstsq(system, right[:, None], driver="gelsd").solution
    return solution[:n, 0] - solution[:n, 0].mean()
