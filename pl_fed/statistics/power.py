"""Power of the paired t-test: the number of seeds that decides a difference.

All functions are for the two-sided test with independent, normal differences. The deviation is that
of the *differences* between two methods on equal seeds. From a few seeds it is uncertain itself: of
five seeds, a 95 % interval of the deviation reaches from 0.6 to 2.9 times its estimate. They are
not for judging a study afterwards by its own observed difference.

Source: J. Cohen, "Statistical Power Analysis for the Behavioral Sciences", second edition, 1988,
section 2.3.5; the noncentral t distribution instead of his tables.
"""

import math

from pl_fed.statistics.samples import check_share

ALPHA, POWER = 0.05, 0.8
_MOST_SEEDS = 10**9


def paired_t_power(
    difference: float, deviation: float, num_seeds: int, alpha: float = ALPHA
) -> float:
    """Return the chance that a paired t-test over seeds finds a difference.

    Args:
        difference: The true mean difference, of any sign.
        deviation: The standard deviation of the differences over seeds, above 0.
        num_seeds: Number of seeds, at least 2.
        alpha: The level of the test, in (0, 1).

    Returns:
        The power, in [α, 1]; α for a difference of 0.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> round(paired_t_power(difference=0.02, deviation=0.01, num_seeds=5), 2)
        0.91
    """
    from scipy.stats import nct, norm, t  # scipy.stats takes long to import

    _check_plan(deviation, alpha)
    if num_seeds < 2:
        raise ValueError(f"Expected argument `num_seeds` to be at least 2 but got {num_seeds}.")
    if not math.isfinite(difference):
        raise ValueError(f"Expected argument `difference` to be finite but got {difference}.")
    shift = abs(difference) / deviation * math.sqrt(num_seeds)
    if shift == 0:
        return alpha
    freedom = num_seeds - 1
    critical = float(t.isf(alpha / 2, freedom))
    if shift > 30 and freedom >= 1000:  # the noncentral t distribution is normal there
        return float(norm.sf(critical - shift))
    opposite = float(nct.cdf(-critical, freedom, shift))
    power = float(nct.sf(critical, freedom, shift)) + (0.0 if math.isnan(opposite) else opposite)
    return min(1.0, max(alpha, power))


def count_seeds(
    difference: float, deviation: float, power: float = POWER, alpha: float = ALPHA
) -> int:
    """Return the smallest number of seeds with which a paired t-test finds a difference.

    Args:
        difference: The mean difference to be found, other than 0.
        deviation: The standard deviation of the differences over seeds, above 0.
        power: The wanted chance to find it, in (α, 1).
        alpha: The level of the test, in (0, 1).

    Returns:
        The number of seeds, at least 2.

    Raises:
        ValueError: If an argument is out of range, or a billion seeds are not enough.

    Example:
        >>> count_seeds(difference=0.01, deviation=0.01)
        10
    """
    _check_power(power, alpha)
    if difference == 0:
        raise ValueError("Expected argument `difference` to be other than 0: no number finds it.")
    high = 2
    while paired_t_power(difference, deviation, high, alpha) < power:
        high *= 2
        if high > _MOST_SEEDS:
            raise ValueError(
                f"Expected arguments `difference` and `deviation` for which {_MOST_SEEDS:.0e} seeds"
                f" are enough but got {difference} and {deviation}."
            )
    low = high // 2  # not enough, or 1
    while high - low > 1:
        middle = (low + high) // 2
        if paired_t_power(difference, deviation, middle, alpha) < power:
            low = middle
        else:
            high = middle
    return high


def smallest_difference(
    deviation: float, num_seeds: int, power: float = POWER, alpha: float = ALPHA
) -> float:
    """Return the smallest difference that a paired t-test over so many seeds finds.

    Args:
        deviation: The standard deviation of the differences over seeds, above 0.
        num_seeds: Number of seeds, at least 2.
        power: The wanted chance to find it, in (α, 1).
        alpha: The level of the test, in (0, 1).

    Returns:
        The difference, above 0, in the unit of ``deviation``.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> round(smallest_difference(deviation=0.01, num_seeds=5), 4)
        0.0168
    """
    from scipy.optimize import brentq  # scipy.optimize takes long to import

    _check_power(power, alpha)
    _check_plan(deviation, alpha)

    def missing_power(effect: float) -> float:
        return paired_t_power(effect, 1.0, num_seeds, alpha) - power

    high = 1.0
    while missing_power(high) < 0:
        high *= 2
    return deviation * float(brentq(missing_power, 0.0, high, xtol=1e-12))


def _check_plan(deviation: float, alpha: float) -> None:
    check_share(alpha, "alpha")
    if not (deviation > 0 and math.isfinite(deviation)):
        raise ValueError(
            f"Expected argument `deviation` to be a number above 0 but got {deviation}."
        )


def _check_power(power: float, alpha: float) -> None:
    check_share(alpha, "alpha")
    if not alpha < power < 1:
        raise ValueError(
            f"Expected argument `power` to be above `alpha` ({alpha}) and below 1 but got {power}."
        )
