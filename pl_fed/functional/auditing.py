"""An audit of differential privacy by canaries: the empirical ε of released models.

G. Andrew et al., "One-shot Empirical Privacy Estimation for Federated Learning", ICLR 2024, arXiv
2302.03098, Algorithm 2. The cosine of a released update and a canary's direction is N(0, 1/d) if
the canary took no part. The cosines of the canaries that took part have another distribution, and
a normal one is fitted to it. The empirical ε is that of an observer who has to tell the two apart.
"""

import math
from statistics import NormalDist

import torch  # noqa: F401
from torch import Tensor

from pl_fed.random import key, normal_row


def canary_direction(seed: int, client: int, numel: int) -> Tensor:
    """Return the direction of a canary, uniform on the unit sphere, float64 [numel].

    Example:
        >>> float(canary_direction(0, 3, 100).norm().round(decimals=12))
        1.0
    """
    row = normal_row(key(seed, "canary", client), numel)
    direction: Tensor = row / row.norm()
    return direction


def empirical_epsilon(released: Tensor, canaries: Tensor, delta: float) -> float:
    """Return the empirical ε of a released update with canaries.

    It is an estimate, not a bound: a mechanism may be worse for other clients than canaries. It is
    NaN for an update with NaN or infinity, which says nothing of its canaries.

    Args:
        released: The sum of all released updates, such as w^T − w^0, [d].
        canaries: The canaries' directions, unit rows, [n, d] with n at least 2.
        delta: δ in (0, 1).

    Example:
        >>> rows = torch.stack([canary_direction(0, k, 1000) for k in range(50)])
        >>> empirical_epsilon(canary_direction(1, 0, 1000), rows, delta=0.1) < 0.6
        True
        >>> empirical_epsilon(rows.sum(0), rows, delta=0.1) > 5
        True
    """
    if not released.isfinite().all():
        return math.nan
    cosines = (canaries.double() @ released.double()) / released.double().norm()
    null = NormalDist(0.0, 1 / math.sqrt(len(released)))
    observed = NormalDist(float(cosines.mean()), float(cosines.std()))
    return max(
        normal_epsilon(null, observed, delta),
        normal_epsilon(observed, null, delta),
    )


def normal_epsilon(first: NormalDist, second: NormalDist, delta: float) -> float:
    """Return the smallest ε with P[S] ≤ e^ε Q[S] + δ for all sets S, of two normal distributions.

    Args:
        first: P.
        second: Q.
        delta: δ in (0, 1).

    Example:
        >>> normal_epsilon(NormalDist(0, 1), NormalDist(0, 1), 1e-3)
        0.0
    """
    if _excess(first, second, 0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while _excess(first, second, high) > delta:
        low, high = high, 2 * high
        if high > 1e6:
            return math.inf
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _excess(first, second, middle) > delta else (low, middle)
    return high


def _excess(first: NormalDist, second: NormalDist, epsilon: float) -> float:
    """Return max over sets S of P[S] − e^ε Q[S].

    The best set is {x : log p(x) / q(x) > ε}, where the logarithm is a quadratic function of x.
    """
    a, b = 1 / first.variance, 1 / second.variance
    square = (b - a) / 2
    slope = first.mean * a - second.mean * b
    offset = (second.mean**2 * b - first.mean**2 * a) / 2 + math.log(second.stdev / first.stdev)
    measure = _positive_set(square, slope, offset - epsilon)
    excess = 0.0
    for low, high in measure:
        excess += _probability(first, low, high)
        excess -= math.exp(min(epsilon, 700.0)) * _probability(second, low, high)
    return max(0.0, excess)


def _probability(normal: NormalDist, low: float, high: float) -> float:
    """Return the probability of an interval, with a small relative error in both tails."""
    a, b = ((end - normal.mean) / (math.sqrt(2) * normal.stdev) for end in (low, high))
    if a > 0:
        a, b = -b, -a
    return (math.erfc(-b) - math.erfc(-a)) / 2


def _positive_set(square: float, slope: float, offset: float) -> list[tuple[float, float]]:
    """Return the intervals in which square · x² + slope · x + offset is positive."""
    if abs(square) < 1e-12 * (abs(slope) + 1):
        if slope == 0:
            return [(-math.inf, math.inf)] if offset > 0 else []
        root = -offset / slope
        return [(root, math.inf)] if slope > 0 else [(-math.inf, root)]
    discriminant = slope**2 - 4 * square * offset
    if discriminant <= 0:
        return [(-math.inf, math.inf)] if square > 0 else []
    roots = sorted((-slope + sign * math.sqrt(discriminant)) / (2 * square) for sign in (-1, 1))
    if square < 0:
        return [(roots[0], roots[1])]
    return [(-math.inf, roots[0]), (roots[1], math.inf)]
