"""Durability of a backdoor: how long it lasts after its attackers have stopped."""

from collections.abc import Mapping
from typing import NamedTuple


class Durability(NamedTuple):
    """Durability of a backdoor after the end of the attack.

    Attributes:
        rounds: Rounds without an attack until the success is at most half of its last value under
            attack. If it never falls so far, the number of rounds until the last evaluation, which
            is a lower bound.
        outlasts: Whether the success never falls to half.
    """

    rounds: int
    outlasts: bool


def measure_durability(success: Mapping[int, float], stop_round: int) -> Durability | None:
    """Return the durability of a backdoor; ``None`` without a success to lose.

    Args:
        success: The success of the backdoor after each evaluated round, in [0, 1], by round from 0.
        stop_round: The first round without an attack.

    Example:
        >>> measure_durability({8: 0.2, 9: 0.8, 10: 0.7, 12: 0.4, 13: 0.6}, stop_round=10)
        Durability(rounds=3, outlasts=False)
        >>> measure_durability({9: 0.8, 10: 0.7, 19: 0.5}, stop_round=10)
        Durability(rounds=10, outlasts=True)
    """
    attacked = [round for round in success if round < stop_round]
    later = sorted(round for round in success if round >= stop_round)
    if not attacked or not later or not success[max(attacked)] > 0:
        return None
    half = success[max(attacked)] / 2
    for round in later:
        if success[round] <= half:
            return Durability(round - stop_round + 1, False)
    return Durability(later[-1] - stop_round + 1, True)
