"""The numbers of metrics.csv by column."""

import io
import math

import numpy as np
import pytest

from pl_fed.reports.group import Curve
from pl_fed.reports.metric_table import MetricTable
from pl_fed.reports.picture import _thin


def read(text):
    return MetricTable.read(io.StringIO(text, newline=""))


def test_rows_of_one_round_are_joined_and_sorted():
    table = read("round,a,b,c\n2,1,,\n0,3,4,\n2,,5,\n2,7,,\n")
    assert table.rounds == [0, 2]
    assert table.rows == {0: {"a": 3, "b": 4}, 2: {"a": 7, "b": 5}}
    assert [*table.columns] == ["a", "b"], "a column without a number is no metric"
    assert table.curve("b") == {0: 4, 2: 5}
    assert table.curve("c") == {}
    assert table.last("a") == (2, 7)


def test_damaged_rows_and_cells_are_counted():
    table = read("round,a,b\n0,x,1\n,2,3\nnan,2,3\n1,inf\n\n3,nan,5,6\n")
    assert table.rows == {0: {"b": 1}, 1: {"a": math.inf}, 3: {"b": 5}}
    assert (table.damaged_rows, table.damaged_cells) == (2, 1)


@pytest.mark.parametrize("text", ["", "\n", "round,a\n", "a,b\n1,2\n"])
def test_file_without_rounds(text):
    assert read(text).rounds == []
    assert read(text).columns == {}


def test_huge_rounds_are_damaged_rows():
    table = read("round,a\n0,1\n1e300,2\n-inf,3\n")
    assert (table.rows, table.damaged_rows) == ({0: {"a": 1}}, 2)


def test_finite_points_leave_out_empty_and_infinite_cells():
    table = read("round,a\n4,inf\n0,1\n2,\n3,-2\n")
    assert table.finite_points("a") == ([0, 3], [1, -2])
    assert table.finite_points("b") == ([], [])


def test_names_of_the_last_round():
    assert read("round,a,b\n0,1,\n1,,2\n").names_of_last_round == ["b"]


def test_thinned_curve_preserves_ends_and_extremes():
    rounds = list(range(50_000))
    mean = np.sin(np.arange(50_000) / 999).tolist()
    mean[12_345], mean[33_333] = 5.0, -5.0
    curve = _thin(Curve(rounds, mean, mean, mean, [1] * 50_000))
    assert len(curve.rounds) <= 4 * 800
    assert [curve.rounds[0], curve.rounds[-1]] == [0, 49_999]
    assert all(curve.mean[place] == mean[round] for place, round in enumerate(curve.rounds))
    assert {12_345, 33_333} <= {*curve.rounds}


def test_short_curve_is_drawn_as_it_is():
    curve = Curve([0, 1], [1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [1, 1])
    assert _thin(curve) is curve
