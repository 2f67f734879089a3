"""Projection onto the simplex against bisection, and its conditions of optimality."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from torch.testing import assert_close

from pl_fed.functional.simplex import project_onto_simplex

numbers = st.lists(st.floats(-50, 50), min_size=1, max_size=9)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(numbers)
@pytest.mark.slow
def test_projection_equals_bisection_on_the_threshold(values):
    array = np.array(values)
    theta = brentq(
        lambda x: np.maximum(array - x, 0).sum() - 1, array.min() - 2, array.max(), xtol=1e-13
    )
    expected = torch.from_numpy(np.maximum(array - theta, 0))
    assert_close(project_onto_simplex(torch.tensor(values)), expected, rtol=0, atol=1e-5)
    exact = project_onto_simplex(torch.tensor(values, dtype=torch.float64))
    assert_close(exact, expected, rtol=0, atol=1e-11)
    assert_close(project_onto_simplex(exact), exact, rtol=0, atol=1e-14)


def test_points_of_the_simplex_and_far_ones():
    assert project_onto_simplex(torch.tensor([7.0])).tolist() == [1.0]
    assert project_onto_simplex(torch.tensor([1e30, 0.0])).tolist() == [1.0, 0.0]
    assert project_onto_simplex(torch.full((4,), 1e12)).tolist() == pytest.approx([0.25] * 4)
