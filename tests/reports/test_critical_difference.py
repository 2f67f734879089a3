"""The critical-difference diagram: its numbers, its texts and its bars."""

import itertools

import numpy as np
import pytest

from pl_fed.reports.critical_difference import draw_critical_difference
from pl_fed.statistics import compare_ranks


def lines_of(picture):
    (axes,) = picture.figure.axes
    return [line.get_xydata() for line in axes.lines]


def bars_of(picture):
    """The vertical lines beyond the ranks, which join methods."""
    bars = [line for line in lines_of(picture) if len(line) == 2 and line[0, 0] == line[1, 0]]
    return [bar for bar in bars if bar[0, 0] > len(picture.rows)]


def scale_of(picture):
    """The horizontal line above the first method, which is the critical difference."""
    (scale,) = [line for line in lines_of(picture) if (line[:, 1] == -0.75).all()]
    return scale[1, 0] - scale[0, 0]


def test_diagram_has_the_ranks_and_a_bar_for_each_group():
    scores = np.random.default_rng(0).normal([3.0, 2.8, 1.5, 1.4, 0.0], 0.3, size=(20, 5))
    comparison = compare_ranks(scores, ["a", "b", "c", "d", "e"])
    assert len(comparison.groups) >= 2
    picture = draw_critical_difference(comparison, metric="accuracy of the worst 10 %")
    (axes,) = picture.figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == list(comparison.names)
    points = [line[0] for line in lines_of(picture) if len(line) == 1]
    assert points == [pytest.approx((r, y)) for y, r in enumerate(comparison.average_ranks)]
    spans = [(bar[0, 1] + 0.25, bar[1, 1] - 0.25) for bar in bars_of(picture)]
    assert spans == [pytest.approx(group) for group in comparison.groups]
    assert scale_of(picture) == pytest.approx(comparison.difference)
    assert "worst 10 %" in picture.title
    assert picture.note == ""
    assert f"difference {comparison.difference:.2f}" in picture.caption
    assert "p < 0.001" in picture.caption
    assert [row["method"] for row in picture.rows] == list(comparison.names)
    assert picture.rows[0]["groups"] == "1"


def test_diagram_says_that_nothing_differs():
    scores = np.random.default_rng(1).normal(size=(3, 4))
    comparison = compare_ranks(scores, ["a", "b", "c", "d"])
    picture = draw_critical_difference(comparison)
    assert picture.note.startswith("Friedman's test does not reject")
    assert comparison.difference < 3
    assert scale_of(picture) == pytest.approx(comparison.difference)
    few = compare_ranks(scores[:2], ["a", "b", "c", "d"])
    assert few.difference > 3
    assert scale_of(draw_critical_difference(few)) == 3, "the scale ends with the ranks"


@pytest.mark.slow
@pytest.mark.parametrize("methods", [2, 30])
def test_diagram_of_few_and_many_methods_is_drawn(methods):
    scores = np.random.default_rng(2).normal(np.linspace(4, 0, methods), size=(25, methods))
    comparison = compare_ranks(scores, [f"a $method$ {number}" for number in range(methods)])
    picture = draw_critical_difference(comparison)
    assert picture.svg() == picture.svg()
    assert picture.png().startswith(b"\x89PNG")
    bars = bars_of(picture)
    assert len(bars) == len(comparison.groups)
    for bar, other in itertools.combinations(bars, 2):
        apart = other[0, 1] > bar[1, 1] or bar[0, 1] > other[1, 1]
        assert apart or other[0, 0] != bar[0, 0], "two bars lie on each other"
