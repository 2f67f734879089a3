"""The numbers of metrics.csv by column."""

import io
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pl_fed.reports.group import Curve
from pl_fed.reports.metric_table import MetricTable, _parse_plain_rows, parse_cells
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


@pytest.mark.parametrize("cut", ["2,", "2,0.2", "2,0.25,7"])
def test_row_of_a_killed_process_is_damaged(cut):
    """Its last number was read as it stood there: 0.25 in place of 0.257."""
    table = read(f"round,a,b\n0,1,5\n1,2,6\n{cut}")
    assert table.rows == {0: {"a": 1, "b": 5}, 1: {"a": 2, "b": 6}}
    assert (table.damaged_rows, table.damaged_cells) == (1, 0)


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


def test_validation_behind_the_fit_replaces_none_of_a_round():
    """A checkpoint of round 0 is validated with the number of rounds behind it, 1."""
    text = "round,time/round,val/a,test/a\n0,1,0.5,\n1,1,0.25,\n1,,0.5,0.75\n2,,0.125,\n"
    table = MetricTable.read(io.StringIO(text))
    assert table.curve("val/a") == {0: 0.5, 1: 0.25, 2: 0.125}
    assert table.curve("test/a") == {1: 0.75}
    assert table.last("val/a") == (2, 0.125)


def test_last_cells_are_those_of_the_file_not_of_the_rounds():
    table = read("round,a,b\n0,1,\n3,2,5\n1,,7\n,4,4\n")
    assert table.last_cells == {"a": (1, 3, 2), "b": (2, 1, 7)}
    assert (table.last("b"), table.curve("b")) == ((1, 7), {1: 7, 3: 5})
    assert [read(f"round,a\n0,1\n{row}\n").ends_empty for row in ("1,", "1,2", ",2")] == [
        *(True, False, False)
    ]
    assert not read("round,a\n").ends_empty


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


CELLS = st.one_of(
    st.just(""),
    st.integers(-10, 10**6).map(str),
    st.floats().map(repr),
    st.sampled_from(["nan", "-inf", "1e999", "1.", ".5", "1e-400", "9007199254740993"]),
)


@pytest.mark.slow
@given(st.lists(st.lists(CELLS, min_size=3, max_size=3), min_size=1, max_size=8))
def test_plain_rows_are_read_as_cell_by_cell(rows):
    text = "".join(f"{','.join(row)}\r\n" for row in rows)
    expected, damaged_cells = parse_cells(rows, "abc")
    table = _parse_plain_rows(text, 3)
    assert damaged_cells == 0
    if any(map(any, rows)):
        np.testing.assert_array_equal(table, expected, strict=True)
        is_zero = table == 0
        np.testing.assert_array_equal(np.signbit(table[is_zero]), np.signbit(expected[is_zero]))
    else:
        assert table is None, "rows without a number are read cell by cell"


def test_short_plain_rows_and_blank_lines():
    table = _parse_plain_rows("1\n\n,2\n,,\n3,,4", 3)
    expected = [[1, np.nan, np.nan, 3], [np.nan, 2, np.nan, np.nan], [np.nan, np.nan, np.nan, 4]]
    np.testing.assert_array_equal(table, expected)


@pytest.mark.parametrize(
    "cell",
    ["x", '"1"', "1_0", " 1", "1e", "1.5e5.5", "--1", "nane", "1nan", "e", ".", "é", "1,2,3"],
)
@pytest.mark.parametrize("row", ["0,1,{}", "0,{},1", "{},0,1"])
def test_other_rows_are_read_cell_by_cell(cell, row):
    assert _parse_plain_rows(f"5,6,7\n{row.format(cell)}\n", 3) is None


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("name", ["a", '"a"', '"a,b"', '"a\nb"', '"a\rb"'])
def test_headers_with_quotes_and_other_ends_of_lines(name, end):
    table = read(end.join(["round," + name, "2,3", "4,5", ""]))
    assert table.rounds == [2, 4]
    assert table.curve(name.strip('"')) == {2: 3, 4: 5}
