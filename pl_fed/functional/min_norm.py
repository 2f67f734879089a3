"""The shortest combination of some vectors: a small quadratic program."""

import torch
from torch import Tensor

_TOLERANCE = 1e-14  # of differences of the gradient, of products up to 1, for each of n vectors


def min_norm_weights(products: Tensor, low: float, high: float) -> Tensor:
    """Return the weights of the shortest weighted mean of vectors, given all their products.

    It minimises ``weightsᵀ products weights`` over weights in [low, high] with the sum 1, by the
    active-set method (J. Nocedal and S. J. Wright, "Numerical Optimization", 2nd edition, Algorithm
    16.3): from equal weights, in each pass the shortest mean is sought that moves only those that
    are within the bounds. Either one of them is stopped by a bound and stays there; or the minimum
    is reached, and the one that most wants to leave its bound may.

    Args:
        products: The Gram matrix, symmetric, float64 [n, n]. It may be singular.
        low: At most 1/n.
        high: At least 1/n.

    Returns:
        Shape [n].

    Example:
        >>> vectors = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> min_norm_weights(vectors @ vectors.T, low=0.0, high=1.0)
        tensor([0.2000, 0.8000], dtype=torch.float64)
    """
    n = len(products)
    given, products = products, products.cpu()
    products = products / products.abs().max().clamp(min=torch.finfo(products.dtype).tiny)
    weights = products.new_full((n,), 1 / n)
    free = torch.full((n,), low < high)
    for _ in range(10 * n if low < high else 0):  # n, as a rule
        moving = free.nonzero()[:, 0]
        gradient = products @ weights
        step = _step_to_minimum(products[moving][:, moving], gradient[moving])
        room = torch.where(step > 0, high - weights[moving], weights[moving] - low)
        reach = torch.where(step == 0, torch.inf, room / step.abs())
        first = int(reach.argmin())
        if reach[first] < 1:
            weights[moving] = (weights[moving] + reach[first] * step).clamp(low, high)
            weights[moving[first]] = high if step[first] > 0 else low
            free[moving[first]] = False
            continue
        weights[moving] += step
        gradient = products @ weights
        gain = gradient - gradient[moving].mean()  # by less weight, or at the lower bound by more
        gain = torch.where(weights <= low, -gain, gain).masked_fill(free, -torch.inf)
        if gain.max() <= _TOLERANCE * n:
            break
        free[gain.argmax()] = True
    return weights.to(given)


def _step_to_minimum(products: Tensor, gradient: Tensor) -> Tensor:
    """Return the step, of sum 0, to where the gradient is the same in all coordinates."""
    n = len(products)
    if n == 1:
        return torch.zeros_like(gradient)
    system = products.new_zeros(n + 1, n + 1)
    system[:n, :n], system[n, :n], system[:n, n] = products, 1, 1
    right = torch.cat([-gradient, gradient.new_zeros(1)])
    solution: Tensor = torch.linalg.lstsq(system, right[:, None], driver="gelsd").solution
    return solution[:n, 0] - solution[:n, 0].mean()
