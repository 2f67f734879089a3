"""The highest point of a function by few evaluations: known peaks, edges, plains, broken values."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pl_fed.functional.search import highest_point


class Counting:
    """A function, and where it was asked for."""

    def __init__(self, function):
        self.function, self.asked = function, []

    def __call__(self, point):
        self.asked.append(point)
        return self.function(point)


quick = settings(max_examples=100, deadline=None, derandomize=True, database=None)


@quick
@given(
    peak=st.floats(0, 1000),
    sharpness=st.sampled_from([0.5, 1.0, 2.0]),
    start=st.floats(0, 5),
    step=st.floats(0.1, 10),
)
def test_search_finds_a_peak(peak, sharpness, start, step):
    peak += start
    highest = highest_point(lambda x: -(abs(x - peak) ** sharpness), 80, start, step)
    assert highest == pytest.approx(peak, rel=1e-6, abs=1e-6)


@quick
@given(edge=st.floats(0.001, 1000), floor=st.floats(-1, 0))
def test_search_approaches_an_edge_from_below(edge, floor):
    """A model of a defence that rejects distant uploads."""
    highest = highest_point(lambda x: x if x <= edge else floor, 80)
    assert edge * (1 - 1e-6) <= highest <= edge


def test_first_points_by_hand():
    function = Counting(lambda x: -abs(x - 5))
    highest_point(function, evaluations=7)
    golden = (math.sqrt(5) - 1) / 2
    right = 2 + 6 * golden  # 5.708; the mirrored point is 4.292, equally near to 5
    assert function.asked[:5] == [0, 1, 2, 4, 8]
    assert function.asked[5:] == pytest.approx([10 - right, right])


@pytest.mark.parametrize("value", [0.0, -7.0, math.inf])
def test_constant_function_is_highest_at_the_start(value):
    assert highest_point(lambda x: value, 20, start=3.0) == 3


def test_decreasing_function_is_highest_at_the_start():
    assert highest_point(lambda x: -x, 30) == 0


@pytest.mark.parametrize("evaluations", [1, 2, 3, 4, 7, 20])
def test_search_uses_all_evaluations(evaluations):
    for curve in (lambda x: x, lambda x: -x, lambda x: -((x - 3) ** 2)):
        function = Counting(curve)
        highest = highest_point(function, evaluations)
        assert len(function.asked) == evaluations
        assert highest in function.asked, "it was tried"
        assert curve(highest) == max(curve(point) for point in function.asked)
        assert min(function.asked) >= 0


def test_search_of_an_increasing_function_doubles_the_point():
    assert highest_point(lambda x: x, evaluations=12) == 2**10


def test_nan_is_below_all_numbers():
    assert highest_point(lambda x: math.nan if x > 2.5 else x, 40) == pytest.approx(2.5)
    assert highest_point(lambda x: math.nan, 10, start=2.0) == 2
