"""A table of cases is one test, which names every case that fails."""

import pytest
from tables import table_test


@table_test("divisor", [1, 2], ids=["one", "two"])
@table_test("number", [4, 5, 6, 8])
def check_divisible(number, divisor):
    assert number % divisor == 0


@table_test(("number", "words"), [(1, "one"), (2, "two")], ids=str)
def check_capital(number, words):
    assert words.isupper(), number


def notes(error):
    """Return the notes of an error and of its parts."""
    parts = getattr(error, "exceptions", ())
    return [*getattr(error, "__notes__", ()), *(note for part in parts for note in notes(part))]


def test_only_failing_rows_are_named():
    with pytest.raises(AssertionError) as failed:
        check_divisible()
    assert notes(failed.value) == ["The row of 5 failed.", "The row of two failed."]


def test_every_failing_row_is_named():
    with pytest.raises(ExceptionGroup, match="2 of 2 rows failed") as failed:
        check_capital()
    assert notes(failed.value) == ["The row of 1, one failed.", "The row of 2, two failed."]


def test_missing_refusal_is_a_failure():
    @table_test("value", [0])
    def check(value):
        with pytest.raises(ValueError, match="0"):
            pass

    with pytest.raises(pytest.fail.Exception):
        check()


def test_fixtures_and_rows_reach_the_check(tmp_path):
    seen = []

    @table_test("number", range(3))
    def check(tmp_path, number):
        seen.append((tmp_path, number))

    check(tmp_path=tmp_path)
    assert seen == [(tmp_path, number) for number in range(3)]
