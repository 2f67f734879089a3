"""Mathematics of differential privacy: clipping, splits of a budget, and matrix factorisations."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pl_fed.functional.aggregation import merging_dtype, squared_norms

_BLOCK = 1 << 17  # numbers; 1 MiB in float64


def exact_squared_norms(rows: Tensor) -> Tensor:
    """Return the squared norm of each row, in float64.

    On a CPU, rows of fewer bits are copied to float64 block by block within the caches, in half the
    time of :func:`~pl_fed.functional.aggregation.squared_norms`. The difference is a rounding in
    float64, which disappears when the clipping factors are rounded to float32.

    Args:
        rows: Shape [n, d].

    Returns:
        Shape [n].

    Example:
        >>> exact_squared_norms(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        tensor([25.,  1.], dtype=torch.float64)
    """
    if rows.device.type != "cpu" or rows.dtype == torch.float64:
        return squared_norms(rows)
    block = torch.empty(min(rows.shape[1], _BLOCK), dtype=torch.float64)
    norms = torch.zeros(len(rows), dtype=torch.float64)
    for columns in rows.detach().split(_BLOCK, dim=1):
        wide = block[: columns.shape[1]]
        if len(columns):
            norms += torch.stack([torch.dot(wide.copy_(row), wide) for row in columns.unbind()])
    return norms


def gaussian_epsilon(deviation: float, delta: float) -> float:
    """Return ε of the Gaussian mechanism, as dp-accounting computes it, in a tenth of the time.

    Source: B. Balle and Y.-X. Wang, "Improving the Gaussian Mechanism for Differential Privacy",
    ICML 2018, arXiv 1805.06530, Equation 6: ε solves
    Φ(1/(2σ) − εσ) − e^ε Φ(−1/(2σ) − εσ) = δ.

    Args:
        deviation: σ > 0, the deviation of the noise divided by the sensitivity.
        delta: δ in (0, 1).

    Example:
        >>> round(gaussian_epsilon(1.0, 1e-5), 4)
        4.3772
    """
    from scipy.optimize import brentq
    from scipy.special import log_ndtr

    log_delta = np.log(delta)

    def gap(epsilon: float) -> float:
        """Return ln δ(ε) − ln δ, where δ(ε) is the left side of the equation."""
        shift = epsilon * deviation + 1 / (2 * deviation)
        first, second = log_ndtr(1 / deviation - shift), epsilon + log_ndtr(-shift)
        if second >= first:  # by rounding
            return -math.inf
        return float(first + np.log1p(-np.exp(second - first)) - log_delta)

    if gap(0.0) < 0:
        return 0.0
    low, high = 0.0, 1.0
    while gap(high) > 0:
        low, high = high, 10 * high
    return float(brentq(gap, low, high, xtol=1e-12))


def clip_factors(squared_norms: Tensor, clip_norm: float) -> Tensor:
    """Return the factors min(1, C / ‖u_k‖) that clip rows to the norm C.

    Args:
        squared_norms: ‖u_k‖² of each row, [n].
        clip_norm: C > 0.

    Returns:
        float64 [n]; 0 for a row without a finite norm, and for a factor that float32 cannot hold
        with all its digits.

    Example:
        >>> clip_factors(torch.tensor([25.0, 0.25, 0.0, float("nan")]), 1.0).tolist()
        [0.2, 1.0, 1.0, 0.0]
    """
    norms = squared_norms.double().sqrt()
    factors = (clip_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
    is_exact = factors >= torch.finfo(torch.float32).tiny
    return torch.where(norms.isfinite() & is_exact, factors, 0.0)


def bucket_sums(rows: Tensor, factors: Tensor, buckets: Tensor, count: int) -> Tensor:
    """Return the weighted sum of the rows of each bucket, Σ_{k in b} factors_k · rows_k.

    Args:
        rows: Shape [n, d].
        factors: Any numbers, [n].
        buckets: The bucket of each row, from 0 to ``count`` − 1, int64 [n].
        count: The number of buckets B.

    Returns:
        Shape [B, d]; 0 for a bucket without rows.

    Example:
        >>> rows = torch.tensor([[1.0], [5.0], [7.0]])
        >>> bucket_sums(rows, torch.tensor([1.0, 0.5, 1.0]), torch.tensor([2, 0, 2]), 3)
        tensor([[2.5000],
                [0.0000],
                [8.0000]])
    """
    dtype = merging_dtype(rows)
    sums = torch.zeros(count, rows.shape[1], dtype=dtype, device=rows.device)
    for row, factor, bucket in zip(rows, factors.to(dtype), buckets.tolist(), strict=True):
        sums[bucket].addcmul_(row, factor)  # as `weighted_sum` adds them
    return sums


def split_noise(noise_multiplier: float, share: float) -> tuple[float, float]:
    """Split a noise multiplier between the update and the count of clipped clients.

    Source: G. Andrew, O. Thakkar, H. B. McMahan and S. Ramaswamy, "Differentially Private Learning
    with Adaptive Clipping", NeurIPS 2021, arXiv 1905.03871, Theorem 1: the joint release of the
    sum with multiplier z_Δ and of Σ (b_k − 1/2) with deviation σ_b is as private as one Gaussian
    mechanism with multiplier z, where z⁻² = z_Δ⁻² + (2 σ_b)⁻². The share is (2 σ_b)⁻² / z⁻².

    Args:
        noise_multiplier: z > 0.
        share: The count's share of z⁻², in (0, 1).

    Returns:
        z_Δ, and σ_b.

    Example:
        >>> update, count = split_noise(1.0, 0.2)
        >>> round(1 / update**2 + 1 / (2 * count) ** 2, 12)
        1.0
    """
    return noise_multiplier / math.sqrt(1 - share), noise_multiplier / (2 * math.sqrt(share))


def move_clip_norm(clip_norm: float, fraction_below: float, quantile: float, lr: float) -> float:
    """Return the next clipping norm: C · exp(−η (b̃ − γ)).

    Source: Andrew et al., NeurIPS 2021, arXiv 1905.03871, Algorithm 1.

    Args:
        clip_norm: C > 0.
        fraction_below: b̃, the noisy fraction of clients with a norm of at most C.
        quantile: γ, the quantile of the norms that C follows, in (0, 1).
        lr: η > 0.

    Example:
        >>> move_clip_norm(1.0, 0.5, 0.5, 0.2)
        1.0
    """
    return clip_norm * math.exp(-lr * (fraction_below - quantile))


def root_coefficients(band: int) -> list[float]:
    """Return the first coefficients of (1 − x)^{−1/2}: 1, 1/2, 3/8, ...

    As a banded Toeplitz matrix C they factorise the matrix of prefix sums, A = B C. Source: N. P.
    Kalinin and C. Lampert, "Banded Square Root Matrix Factorization for Differentially Private
    Model Training", NeurIPS 2024, arXiv 2405.13763.

    Args:
        band: The number of diagonals b, at least 1.

    Example:
        >>> root_coefficients(3)
        [1.0, 0.5, 0.375]
    """
    coefficients = [1.0]
    for place in range(1, band):
        coefficients.append(coefficients[-1] * (2 * place - 1) / (2 * place))
    return coefficients


def sensitivity_of_bands(min_separation: int, rounds: int) -> float:
    """Return the sensitivity of C G if each client's rows of G are clipped to norm 1.

    C is lower triangular with :func:`root_coefficients` on ``min_separation`` diagonals. A client
    takes part at most once in ``min_separation`` consecutive rounds. Its columns of C then have
    disjoint supports, and the squared sensitivity is the sum of their squared norms. The norms do
    not increase, so rounds 0, b, 2b, ... give the largest sum. Source: C. A. Choquette-Choo et al.,
    "(Amplified) Banded Matrix Factorization", NeurIPS 2023, arXiv 2306.08153, Theorem 2.

    Args:
        min_separation: b, at least 1.
        rounds: The number of rounds, at least 1.

    Example:
        >>> sensitivity_of_bands(1, rounds=9)  # independent noise, nine rounds of one client
        3.0
    """
    squares = [number**2 for number in root_coefficients(min(min_separation, rounds))]
    norms = (sum(squares[: rounds - first]) for first in range(0, rounds, min_separation))
    return math.sqrt(sum(norms))


def next_correlated_row(
    coefficients: Sequence[float], row: Tensor, previous: Sequence[Tensor]
) -> Tensor:
    """Return the next row of C⁻¹ Z by forward substitution.

    Args:
        coefficients: The diagonals of C, from the main one, which is 1: [b].
        row: The next row of Z, independent standard normal numbers, [d].
        previous: The last rows of C⁻¹ Z, the latest first, [d] each.

    Example:
        >>> next_correlated_row([1.0, 0.5], torch.tensor([1.0]), [torch.tensor([4.0])])
        tensor([-1.])
    """
    correlated = row.clone()
    for coefficient, earlier in zip(coefficients[1:], previous):
        correlated.sub_(earlier, alpha=coefficient)
    return correlated
