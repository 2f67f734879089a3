"""Durability of a backdoor by hand, and against a search written otherwise."""

import math

import numpy as np

from pl_fed.functional.durability import Durability, measure_durability


def test_durability_by_hand():
    curve = dict(enumerate([0.1, 0.9, 0.8, 0.41, 0.4, 0.9]))
    assert measure_durability(curve, 3) == Durability(2, False), "0.4 is half of 0.8"
    assert measure_durability(curve, 1) == Durability(5, True), "a bound: 0.05 is never reached"
    assert measure_durability({0: 1.0, 4: 0.5}, 1) == Durability(4, False)


def test_durability_needs_a_success_before_and_an_evaluation_after():
    assert measure_durability({}, 1) is None
    assert measure_durability({0: 0.5}, 1) is None
    assert measure_durability({2: 0.5}, 1) is None
    assert measure_durability({0: 0.0, 1: 0.0}, 1) is None
    assert measure_durability({0: math.nan, 1: 0.0}, 1) is None


def test_durability_agrees_with_numpy_on_drawn_curves():
    draw = np.random.default_rng(0)
    for _ in range(200):
        values, stop = draw.random(12), int(draw.integers(1, 11))
        low = np.flatnonzero(values[stop:] <= values[stop - 1] / 2)
        expected = Durability(int(low[0]) + 1, False) if len(low) else Durability(12 - stop, True)
        assert measure_durability(dict(enumerate(values)), stop) == expected
