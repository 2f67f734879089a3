"""Holm's correction: by hand, statsmodels, and the chance of a false rejection in a family."""

import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pl_fed.statistics import correct_by_holm, format_p_value, paired_t_test

several = settings(max_examples=100, deadline=None, derandomize=True, database=None)
families = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def test_holms_correction_multiplies_by_the_number_of_remaining_tests():
    nan = math.nan
    corrected = correct_by_holm([0.01, nan, 0.04, 0.03, 0.005])
    assert corrected[:1] + corrected[2:] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert math.isnan(corrected[1])
    assert correct_by_holm([0.9, 0.8]) == [1.0, 1.0]
    assert correct_by_holm([]) == []
    assert correct_by_holm([0.2]) == [0.2]


@pytest.mark.slow
@several
@given(families)
def test_holms_correction_is_statsmodels(p_values):
    from statsmodels.stats.multitest import multipletests

    with mock.patch("gc.collect"):  # it collects garbage for each family: 0.1 s
        expected = multipletests(p_values, method="holm")[1]
    assert correct_by_holm(p_values) == pytest.approx(expected)


@several
@given(families)
def test_corrected_values_keep_the_order_and_lie_between_bonferroni_and_none(p_values):
    corrected = correct_by_holm(p_values)
    order = np.argsort(p_values, kind="stable")
    assert (np.diff(np.array(corrected)[order]) >= 0).all()
    for p_value, value in zip(p_values, corrected):
        assert p_value <= value <= 1
    assert min(corrected) == min(1.0, len(p_values) * min(p_values))


def test_values_that_are_no_probabilities_are_refused():
    with pytest.raises(ValueError, match=r"in \[0, 1\] but got 1.5"):
        correct_by_holm([0.5, 1.5])


@pytest.mark.slow
def test_family_is_rejected_falsely_in_at_most_five_percent():
    """Ten true null hypotheses that share a baseline, so that the tests are dependent."""
    generator, any_plain, any_corrected = np.random.default_rng(0), 0, 0
    for _ in range(600):
        runs = generator.normal(size=(11, 8))
        p_values = [paired_t_test(run, runs[0]).p_value for run in runs[1:]]
        any_plain += min(p_values) <= 0.05
        any_corrected += min(correct_by_holm(p_values)) <= 0.05
    assert any_corrected / 600 <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 600)
    assert any_plain / 600 > 0.2, "or the correction has nothing to do"


@pytest.mark.parametrize(
    ("p_value", "text"), [(math.nan, "–"), (0.0009, "< 0.001"), (0.004, "0.004"), (0.25, "0.25")]
)
def test_p_values_have_at_most_three_decimals(p_value, text):
    assert format_p_value(p_value) == text
