"""Inequality of clients: Gini, coefficient of variation, entropy, divergence, angle and gaps.

The Gini coefficient is the relative mean difference of C. Gini, "Variabilità e mutabilità", 1912;
the entropy is that of C. E. Shannon, "A Mathematical Theory of Communication", 1948, of the shares
p_i = a_i / Σ a, and its quotient with ln n is the evenness of E. C. Pielou, 1966. The angle to
(1, …, 1) and the divergence from the uniform distribution are measures of uniformity in T. Li, M.
Sanjabi, A. Beirami and V. Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020, arXiv
1905.10497, appendix A.

Figures of shares are undefined, and NaN, if a value is negative or NaN, or if all values are 0: a
negative value is no share of a sum. Gaps and quantiles are defined for all numbers. Jain's index is
1 / (1 + c²) with the coefficient of variation c.
"""

import math

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


def gini_coefficient(values: Values) -> float:
    """Return the Gini coefficient Σ_ij |a_i − a_j| / (2 n² mean a): 0 for equal values.

    It is 1 − 1/n if one client has everything.

    Args:
        values: One value for each client, [clients].

    Raises:
        ValueError: If there is no client.

    Example:
        >>> gini_coefficient(np.array([1.0, 0.0, 0.0, 0.0]))
        0.75
    """
    if not _has_shares(values):
        return math.nan
    ordered, number = np.sort(values / values.max()), len(values)
    weights = 2 * np.arange(1, number + 1) - number - 1  # Σ_ij |a_i − a_j| = 2 Σ_i w_i a_(i)
    return float((weights * ordered).sum() / (number * ordered.sum()))


def variation_coefficient(values: Values) -> float:
    """Return the coefficient of variation: the population standard deviation / the mean.

    Args:
        values: One value for each client, [clients].

    Raises:
        ValueError: If there is no client.

    Example:
        >>> variation_coefficient(np.array([2.0, 0.0]))
        1.0
    """
    if not _has_shares(values):
        return math.nan
    scaled = values / values.max()  # its squares neither overflow nor underflow
    return float(scaled.std() / scaled.mean())


def share_entropy(values: Values) -> float:
    """Return the entropy −Σ p ln p of the shares, in nats: ln n for equal values.

    Args:
        values: One value for each client, [clients].

    Raises:
        ValueError: If there is no client.

    Example:
        >>> share_entropy(np.array([1.0, 0.0]))
        0.0
    """
    if not _has_shares(values):
        return math.nan
    scaled = values / values.max()
    shares = scaled[scaled > 0] / scaled.sum()
    return abs(float((shares * np.log(shares)).sum()))  # 0 and not −0 for a single share


def pielou_evenness(values: Values) -> float:
    """Return Pielou's evenness: the entropy of the shares divided by ln n, 1 for equal values.

    It is 1 for a single client.

    Args:
        values: One value for each client, [clients].

    Raises:
        ValueError: If there is no client.

    Example:
        >>> pielou_evenness(np.array([1.0, 1.0, 0.0, 0.0]))
        0.5
    """
    entropy = share_entropy(values)
    if len(values) > 1:
        return entropy / math.log(len(values))
    return entropy if math.isnan(entropy) else 1.0


def uniform_divergence(values: Values) -> float:
    """Return the Kullback-Leibler divergence Σ p ln(n p) of the shares from 1/n, in nats.

    Args:
        values: One value for each client, [clients].

    Raises:
        ValueError: If there is no client.

    Example:
        >>> uniform_divergence(np.array([2.0, 2.0]))
        0.0
    """
    entropy = share_entropy(values)
    return max(0.0, math.log(len(values)) - entropy) if not math.isnan(entropy) else math.nan


def equality_angle(values: Values) -> float:
    """Return the angle between the values and (1, …, 1) in degrees: 0 for equal values.

    Its cosine is the square root of Jain's index, so that its tangent is the coefficient of
    variation; this form is exact near 0.

    Args:
        values: One value for each client, [clients].

    Raises:
        ValueError: If there is no client.

    Example:
        >>> round(equality_angle(np.array([1.0, 0.0])), 9)
        45.0
    """
    return math.degrees(math.atan(variation_coefficient(values)))


def largest_gap(values: Values) -> float:
    """Return the largest minus the smallest value; NaN if a value is NaN.

    Args:
        values: One value for each client, [clients].

    Raises:
        ValueError: If there is no client.

    Example:
        >>> largest_gap(np.array([0.5, -0.25]))
        0.75
    """
    _require_clients(values)
    return float(values.max() - values.min())


def tail_mean(values: Values, percent: int, largest: bool = False) -> float:
    """Return the mean over the clients with the smallest, or the largest, values.

    Args:
        values: One value for each client, [clients].
        percent: Share of the clients, 1 to 100. The number of clients is rounded up.
        largest: Whether to take the largest values.

    Raises:
        ValueError: If there is no client, or ``percent`` is out of range.

    Example:
        >>> tail_mean(np.array([0.5, 0.1, 0.9, 0.3]), 50)
        0.2
    """
    _require_clients(values)
    if not 1 <= percent <= 100:
        raise ValueError(f"Expected argument `percent` to be in [1, 100] but got {percent}.")
    if np.isnan(values).any():
        return math.nan
    number = -(-len(values) * percent // 100)
    ordered = np.sort(values)
    return float((ordered[-number:] if largest else ordered[:number]).mean())


def quantile(values: Values, percent: int) -> float:
    """Return a quantile, linear between the two nearest values; NaN if a value is NaN.

    Args:
        values: One value for each client, [clients].
        percent: The share of clients below it, 0 (smallest value) to 100 (largest value).

    Raises:
        ValueError: If there is no client, or ``percent`` is out of range.

    Example:
        >>> quantile(np.array([0.0, 1.0, 4.0]), 75)
        2.5
    """
    _require_clients(values)
    if not 0 <= percent <= 100:
        raise ValueError(f"Expected argument `percent` to be in [0, 100] but got {percent}.")
    if not np.isfinite(values).all() and not np.isnan(values).any():
        place = percent / 100 * (len(values) - 1)  # ∞ − ∞ is no number
        low, high = np.sort(values)[[math.floor(place), math.ceil(place)]]
        if low == high or (low == -math.inf and high < math.inf):
            return float(low)
        return float(low + place % 1 * (high - low))
    return float(np.quantile(values, percent / 100))


def _has_shares(values: Values) -> bool:
    """Return whether the values have shares of a sum: none is negative, and one is above 0."""
    _require_clients(values)
    return bool(np.isfinite(values).all() and values.min() >= 0 and values.max() > 0)


def _require_clients(values: Values) -> None:
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(
            "Expected argument `values` to be of shape [clients] with at least one client "
            f"but got shape {list(values.shape)}."
        )
