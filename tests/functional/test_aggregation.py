"""Rows that are sorted and merged, against numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from pl_fed.functional.aggregation import coordinate_median, merging_dtype, sorted_columns

matrices = arrays(
    np.float64,
    array_shapes(min_dims=2, max_dims=2, max_side=8),
    elements=st.floats(-1e6, 1e6, allow_subnormal=False),
)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(rows=matrices)
def test_median_and_order_against_numpy(rows):
    given_rows = torch.from_numpy(rows)
    assert np.array_equal(sorted_columns(given_rows).numpy(), np.sort(rows, axis=0))
    np.testing.assert_allclose(
        coordinate_median(given_rows).numpy(), np.median(rows, axis=0), rtol=1e-15
    )


def test_the_numpy_and_the_torch_branch_agree():
    rows = torch.randn(11, 500, generator=torch.Generator().manual_seed(3))
    assert torch.equal(sorted_columns(rows), rows.sort(dim=0).values)


def test_rows_with_a_gradient_are_taken():
    rows = torch.ones(3, 2, requires_grad=True)
    assert not coordinate_median(rows).requires_grad


def test_the_sorted_columns_are_new_memory():
    rows = torch.ones(1, 3)
    sorted_columns(rows).fill_(5.0)
    coordinate_median(rows).fill_(5.0)
    assert torch.equal(rows, torch.ones(1, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_merging_is_in_float32_at_least(dtype):
    assert merging_dtype(torch.ones(1, dtype=dtype)) == torch.float32
    assert merging_dtype(torch.ones(1, dtype=torch.float64)) == torch.float64
