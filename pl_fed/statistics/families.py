"""Families of tests: p-values that are corrected for the number of tests, and their text."""

import math
from collections.abc import Sequence


def correct_by_holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number by Holm's method.

    The smallest of m p-values is multiplied by m, the next one by m − 1, and so on. No corrected
    value is below an earlier one, or above 1. Rejecting those up to α keeps the chance of any false
    rejection at most α, whatever the dependence between the tests. It is not for a family that was
    chosen after the p-values were seen.

    Args:
        p_values: p-values in [0, 1]. NaN stays NaN and counts as no test.

    Raises:
        ValueError: If a p-value is out of range.

    Source: S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal
    of Statistics 6, 1979.

    Example:
        >>> correct_by_holm([0.01, 0.5, 0.02])
        [0.03, 0.5, 0.04]
    """
    for p_value in p_values:
        if not math.isnan(p_value) and not 0 <= p_value <= 1:
            raise ValueError(f"Expected argument `p_values` to be in [0, 1] but got {p_value}.")
    tests = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    corrected, largest = [math.nan] * len(p_values), 0.0
    for rank, (p_value, place) in enumerate(tests):
        largest = max(largest, min(1.0, (len(tests) - rank) * p_value))
        corrected[place] = largest
    return corrected


def format_p_value(p_value: float) -> str:
    """Format a p-value with two digits, and three decimals at most; a dash for NaN.

    Example:
        >>> [format_p_value(p_value) for p_value in (0.0004, 0.0123, 0.25)]
        ['< 0.001', '0.012', '0.25']
    """
    if math.isnan(p_value):
        return "–"
    if p_value < 0.001:
        return "< 0.001"
    return f"{p_value:.3f}" if p_value < 0.1 else f"{p_value:.2f}"
