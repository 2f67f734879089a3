"""Intervals of a mean, or of another statistic, over independent runs."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from pl_fed.statistics.draws import split_draws
from pl_fed.statistics.samples import Floats, check_draws, check_sample, check_share

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """Estimate with a confidence interval.

    Args:
        estimate: The estimate, such as a mean.
        low: The lower end; minus infinity without an interval, as for a single number.
        high: The upper end; infinity without an interval.
        level: The confidence level, in (0, 1).
    """

    estimate: float
    low: float
    high: float
    level: float = LEVEL

    @classmethod
    def point(cls, number: float) -> "Interval":
        """Return a number without an interval."""
        return cls(number, -math.inf, math.inf)

    def text(self, digits: int = 2, sign: bool = False) -> str:
        """Return ``estimate [low, high]``; the estimate alone without an interval.

        Args:
            digits: Decimals.
            sign: Whether positive numbers have a plus sign.

        Example:
            >>> Interval(0.5, -0.25, 1.25).text(sign=True)
            '+0.50 [−0.25, +1.25]'
        """
        numbers = [self.estimate] if math.isinf(self.low) else [self.estimate, self.low, self.high]
        estimate, *ends = (
            f"{number:{'+' if sign else ''}.{digits}f}".replace("-", "−") for number in numbers
        )
        return f"{estimate} [{ends[0]}, {ends[1]}]" if ends else estimate


def t_interval(values: ArrayLike, level: float = LEVEL) -> Interval:
    """Return the mean with Student's interval: mean ± t · s / √n, with n − 1 degrees of freedom.

    Assumes independent values with a normal distribution, such as one value for each seed. From
    about ten values on, a moderate skewness does little harm. It is not for clients of one run,
    because they share a global model, and not for values near a bound, such as accuracies of 1.

    Args:
        values: The values, [n]; a single one has no interval. Their order does not matter.
        level: The confidence level, in (0, 1).

    Raises:
        ValueError: If there is no value, or a value is not finite.

    Source: Student, "The Probable Error of a Mean", Biometrika 6, 1908.

    Example:
        >>> t_interval([1.0, 2.0, 3.0]).text()
        '2.00 [−0.48, 4.48]'
    """
    check_share(level, "level")
    sample = check_sample(values)
    mean = compute_mean(sample)
    if len(sample) < 2:
        return Interval(mean, -math.inf, math.inf, level)
    error = compute_deviation(sample) / math.sqrt(len(sample))
    half = float(special.stdtrit(len(sample) - 1, (1 + level) / 2)) * error
    return Interval(mean, mean - half, mean + half, level)


def compute_mean(sample: Floats) -> float:
    """Return the mean, rounded once: the order of the values does not matter."""
    return float(statistics.mean(sample.tolist()))


def compute_deviation(sample: Floats) -> float:
    """Return the sample standard deviation (n − 1), rounded once; 0 for equal values."""
    return float(statistics.stdev(sample.tolist()))


def mean_statistic(values: Floats) -> Floats:
    """Return the means over the last axis."""
    return np.asarray(values.mean(-1))


def bootstrap_interval(
    values: ArrayLike,
    statistic: Callable[[Floats], Floats] = mean_statistic,
    level: float = LEVEL,
    method: Literal["bca", "percentile"] = "bca",
    draws: int = 9_999,
    seed: int = 0,
) -> Interval:
    """Return a statistic with its bootstrap interval over independent values.

    Assumes independent values of one distribution, of any form. It is not for few values: with
    five seeds, a 95 % interval of a normal mean covers it in about 84 % of samples
    (experiments/statistics). Prefer :func:`t_interval` of a mean below 20 values. ``"percentile"``
    takes quantiles of the resampled statistics, and ``"bca"`` corrects them for bias and skewness.

    Args:
        values: The values, [n]; a single one has no interval. Their order does not matter.
        statistic: Maps values [..., n] to statistics [...]; the mean by default.
        level: The confidence level, in (0, 1).
        method: ``"bca"`` or ``"percentile"``.
        draws: Number of resamples.
        seed: Seed of the resamples. Equal arguments give equal numbers.

    Raises:
        ValueError: If there is no value, or a value is not finite.

    Source: B. Efron, "Better Bootstrap Confidence Intervals", Journal of the American Statistical
    Association 82, 1987, section 4; the acceleration is the jackknife's, equation 6.6 of T.
    DiCiccio and B. Efron, "Bootstrap Confidence Intervals", Statistical Science 11, 1996.

    Example:
        >>> bootstrap_interval([1.0, 2.0, 3.0, 4.0, 9.0], draws=999).estimate
        3.8
    """
    check_share(level, "level")
    check_draws(draws)
    if method not in ("bca", "percentile"):
        raise ValueError(f"Expected argument `method` to be bca or percentile but got {method!r}.")
    sample = np.sort(check_sample(values))
    estimate = float(statistic(sample))
    if len(sample) < 2:
        return Interval(estimate, -math.inf, math.inf, level)
    generator, chunks = np.random.default_rng(seed), []
    for size in split_draws(draws, len(sample)):
        places = generator.integers(len(sample), size=(size, len(sample)))
        chunks.append(statistic(sample[places]))
    resampled = np.concatenate(chunks)
    probabilities = np.array([(1 - level) / 2, (1 + level) / 2])
    if method == "bca":
        probabilities = _correct_probabilities(probabilities, resampled, sample, statistic)
    low, high = np.quantile(resampled, probabilities)
    return Interval(estimate, float(low), float(high), level)


def _correct_probabilities(
    probabilities: Floats,
    resampled: Floats,
    sample: Floats,
    statistic: Callable[[Floats], Floats],
) -> Floats:
    """Return Φ(z₀ + (z₀ + z) / (1 − a (z₀ + z))) for the normal quantiles z of probabilities.

    The bias z₀ comes from the share of smaller statistics, with half of the equal ones. The share
    stays off 0 and 1 by half a draw, so that z₀ is finite.
    """
    estimate, count = float(statistic(sample)), len(resampled)
    below = (resampled < estimate).sum() + (resampled == estimate).sum() / 2
    bias = special.ndtri(np.clip(below / count, 0.5 / count, 1 - 0.5 / count))
    others = ~np.eye(len(sample), dtype=bool)
    jackknife = statistic(np.stack([sample[mask] for mask in others]))
    deviations = jackknife.mean() - jackknife
    cubes, squares = (deviations**3).sum(), (deviations**2).sum()
    acceleration = cubes / (6 * squares**1.5) if squares > 0 else 0.0
    shifted = bias + special.ndtri(probabilities)
    return np.asarray(special.ndtr(bias + shifted / (1 - acceleration * shifted)))
