"""Marks of combinations: the ids are those of pytest, and the marks those that are asked for."""

import pytest
from exhaustive import exhaustive_but, exhaustive_for


def make_test():
    @pytest.mark.slow
    @pytest.mark.parametrize(("make", "rate"), [(dict, 0.5), (list, None), (dict, "0.5")])
    @pytest.mark.parametrize("size", [pytest.param(3, id="three"), [4]])
    @pytest.mark.parametrize("engine", ["one", "all"], ids={"single": 0, "stack": 1})
    def test(engine, size, make, rate):
        pass

    return test


RATES = ["dict-0.50", "list-None", "dict-0.51"]
PAIRS = ["single-three", "single-size1", "stack-three", "stack-size1"]
IDS = [f"{pair}-{rate}" for pair in PAIRS for rate in RATES]


def read_marks(test):
    """Return whether a combination is exhaustive, by its id."""
    (axis,) = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    assert axis.args[0] == ["engine", "size", "make", "rate"]
    assert axis.args[1][3].values == ("one", [4], dict, 0.5)
    assert [mark.name for mark in test.pytestmark if mark is not axis] == ["slow"]
    return {each.id: any(mark.name == "exhaustive" for mark in each.marks) for each in axis.args[1]}


def test_named_combinations_are_exhaustive_or_all_others_are():
    marks = read_marks(exhaustive_for("single-three-*", "stack-size1-list-None")(make_test()))
    assert list(marks) == IDS
    assert [name for name in IDS if marks[name]] == [*IDS[:3], "stack-size1-list-None"]
    others = read_marks(exhaustive_but("single-three-*", "stack-size1-list-None")(make_test()))
    assert others == {name: not mark for name, mark in marks.items()}


def test_marks_of_parameters_stay():
    @exhaustive_for("2")
    @pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.slow), 2])
    def test(number):
        pass

    names = [[mark.name for mark in each.marks] for each in test.pytestmark[0].args[1]]
    assert names == [["slow"], ["exhaustive"]]


def test_unknown_combination_is_refused():
    with pytest.raises(ValueError, match="Expected ids of test but got 'stack-four'"):
        exhaustive_but("stack-four")(make_test())
