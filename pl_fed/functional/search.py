"""Search for the highest point of a function on a half-line, with few evaluations.

The first phase finds an interval. From the start, the step doubles three times, and then as long as
the value increases. The interval lies between the neighbours of the highest point.

The second phase is golden-section search (J. Kiefer, "Sequential minimax search for a maximum",
Proceedings of the American Mathematical Society, 1953). Every evaluation narrows the interval by a
factor of 0.618.

For a function with one peak, the search converges to the peak. If a function rises up to an edge,
and is flat and lower beyond it, the search converges to the edge from below. Among equal values, it
follows the one nearer to the start.

:func:`largest_accepted` searches for the edge of a region by steps that halve (V. Shejwalkar and
A. Houmansadr, "Manipulating the Byzantine", NDSS 2021, algorithm 1).
"""

import math
from collections.abc import Callable, Generator

_MIN_POINTS = 5  # evaluations before the choice of the interval
_GOLDEN = (math.sqrt(5) - 1) / 2


def highest_point(
    function: Callable[[float], float], evaluations: int, start: float = 0.0, step: float = 1.0
) -> float:
    """Return the point with the highest value of a function, among the evaluated points.

    Args:
        function: The function; NaN counts as lower than all other values.
        evaluations: Number of evaluations, at least 1.
        start: The first point.
        step: Distance of the second point from the first. No point lies on the other side of the
            start.

    Returns:
        The first of the best points.

    Example:
        >>> round(highest_point(lambda x: -((x - 3) ** 2), evaluations=30), 3)
        3.0
    """
    points = _search_points(start, step)
    point, best, highest = next(points), start, -math.inf
    for _ in range(evaluations):
        value = float(function(point))
        value = -math.inf if math.isnan(value) else value
        if value > highest:
            best, highest = point, value
        point = points.send(value)
    return best


def largest_accepted(accepts: Callable[[float], bool], start: float, trials: int) -> float:
    """Return the largest accepted number of a search by steps that halve.

    The first trial and the first step are at ``start``. After each trial, the number grows by half
    of the step if it is accepted, and shrinks by half of the step otherwise; the step halves. No
    number reaches twice the start.

    Args:
        accepts: Whether a number is in the region.
        start: The first number, positive.
        trials: Number of trials, at least 1.

    Returns:
        The last accepted number; 0 if there is none.

    Example:
        >>> round(largest_accepted(lambda x: x <= 2, start=3.0, trials=30), 6)
        2.0
    """
    number, step, accepted = start, start, 0.0
    for _ in range(trials):
        if accepts(number):
            accepted, number = number, number + step / 2
        else:
            number -= step / 2
        step /= 2
    return accepted


def _search_points(start: float, step: float) -> Generator[float, float, None]:
    """Yield the points of the search, and receive the value at each point."""
    points, values = [start], [(yield start)]
    while len(points) < _MIN_POINTS or values[-1] > max(values[:-1]):
        points.append(start + step * 2.0 ** (len(points) - 1))
        values.append((yield points[-1]))
    best = values.index(max(values))
    low, high = points[max(best - 1, 0)], points[best + 1]
    lower, upper = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_lower = yield lower
    at_upper = yield upper
    while True:
        if at_upper > at_lower:
            low, lower, at_lower = lower, upper, at_upper
            upper = low + _GOLDEN * (high - low)
            at_upper = yield upper
        else:
            high, upper, at_upper = upper, lower, at_lower
            lower = high - _GOLDEN * (high - low)
            at_lower = yield lower
