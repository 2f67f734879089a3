"""Every exhaustive test runs in one of the parts."""

import pytest
from lanes import is_chosen

TESTS = [f"tests/test_a.py::test_b[{number}]" for number in range(64)]


def test_parts_are_disjoint_and_together_all_tests():
    parts = [{test for test in TESTS if is_chosen(test, f"{part}/8")} for part in range(1, 9)]
    assert sum(map(len, parts)) == len(TESTS)
    assert set.union(*parts) == set(TESTS)
    assert min(map(len, parts)) > 0
    assert all(is_chosen(test, "all") and not is_chosen(test, "none") for test in TESTS)


@pytest.mark.parametrize("choice", ["0/8", "9/8", "3", "some", "1/0", ""])
def test_other_choices_are_refused(choice):
    with pytest.raises(ValueError, match="Expected `--exhaustive` to be all, none, or 3/8"):
        is_chosen(TESTS[0], choice)
