"""Rows that are sorted and merged, against numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from pl_fed.functional.aggregation import (
    centred_gram_matrix,
    clip_norms,
    coordinate_median,
    gram_matrix,
    inner_products,
    linear_combinations,
    mean_around_median,
    merging_dtype,
    row_norm,
    sign_counts,
    sort_columns,
    squared_distances,
    squared_norms,
    subset_mean,
    trimmed_mean,
)

matrices = arrays(
    np.float64,
    array_shapes(min_dims=2, max_dims=2, max_side=8),
    elements=st.floats(-1e6, 1e6, allow_subnormal=False),
)
WHOLE = st.integers(-5, 5)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(rows=matrices)
def test_median_and_order_against_numpy(rows):
    given_rows = torch.from_numpy(rows)
    assert np.array_equal(sort_columns(given_rows).numpy(), np.sort(rows, axis=0))
    np.testing.assert_allclose(
        coordinate_median(given_rows).numpy(), np.median(rows, axis=0), rtol=1e-15
    )


def test_numpy_and_torch_branches_agree():
    rows = torch.randn(11, 500, generator=torch.Generator().manual_seed(3))
    assert torch.equal(sort_columns(rows), rows.sort(dim=0).values)


def test_rows_with_a_gradient_are_accepted():
    rows = torch.ones(3, 2, requires_grad=True)
    assert not coordinate_median(rows).requires_grad


def test_sorted_columns_are_new_memory():
    rows = torch.ones(1, 3)
    sort_columns(rows).fill_(5.0)
    coordinate_median(rows).fill_(5.0)
    assert torch.equal(rows, torch.ones(1, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_merging_dtype_is_at_least_float32(dtype):
    assert merging_dtype(torch.ones(1, dtype=dtype)) == torch.float32
    assert merging_dtype(torch.ones(1, dtype=torch.float64)) == torch.float64


WIDE = 40_000  # more columns than are taken at a time


def wide_rows(n=5, dtype=torch.float64):
    draw = torch.Generator().manual_seed(n)
    rows = torch.randn(n, WIDE, generator=draw, dtype=torch.float64)
    rows[:, ::3] = 0
    return (rows + 3 * torch.randn(WIDE, generator=draw, dtype=torch.float64).clamp(min=0)).to(
        dtype
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_against_numpy(dtype):
    rows = wide_rows(dtype=dtype)
    exact, vector = rows.double().numpy(), rows[1].double().numpy()
    centred = exact - exact.mean(0)
    products = centred_gram_matrix(rows)
    np.testing.assert_allclose(products.numpy(), centred @ centred.T, rtol=1e-10, atol=1e-8)
    np.testing.assert_allclose(inner_products(rows, rows[1]).numpy(), exact @ vector, rtol=1e-12)
    assert products.dtype == inner_products(rows, rows[1]).dtype == torch.float64


def test_centred_products_keep_small_differences_of_large_rows():
    """The products of the rows themselves would have 1e16 and no digits left."""
    rows = 1e8 + torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    assert centred_gram_matrix(rows).tolist() == [[0.5, -0.5], [-0.5, 0.5]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_combinations_against_numpy(dtype):
    rows = wide_rows(dtype=dtype)
    shares = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    actual = linear_combinations(rows, shares)
    assert actual.dtype == merging_dtype(rows)
    expected = shares.double().numpy() @ rows.double().numpy()
    np.testing.assert_allclose(actual.double().numpy(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_signs_against_numpy(dtype):
    rows = wide_rows(dtype=dtype)
    exact = rows.double().numpy()
    expected = np.stack([(exact > 0).sum(1), (exact == 0).sum(1), (exact < 0).sum(1)], 1)
    assert np.array_equal(sign_counts(rows).numpy(), expected)
    broken = torch.tensor([[torch.nan, torch.inf, -torch.inf, -0.0]])
    assert sign_counts(broken).tolist() == [[1, 2, 1]]


def test_clipped_rows_are_copies_within_the_bound():
    rows = torch.diag(torch.tensor([1.0, 2.0, 4.0, 0.0]))
    actual, clipped = clip_norms(rows, rows.norm(dim=1), torch.tensor(2.0))
    assert actual.diagonal().tolist() == [1.0, 2.0, 2.0, 0.0]
    assert clipped.tolist() == [False, False, True, False]
    actual.fill_(7.0)
    assert rows[0, 0] == 1.0
    zeroed, clipped = clip_norms(rows, rows.norm(dim=1), 0.0)
    assert not zeroed.any()
    assert clipped.tolist() == [True, True, True, False]


MANY = 1 << 18  # numbers that are merged at a time


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "d"), [(1, 3), (2, 64), (3, MANY // 3 + 70), (10, 30_001), (100, 5_300), (300, 2_000)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_merging_in_pieces_is_bit_equal_to_merging_all_columns(n, d, dtype):
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(n)).to(dtype)
    wide = rows.to(merging_dtype(rows))
    ordered = torch.from_numpy(np.sort(wide.numpy(), axis=0))
    middle, trimmed = n // 2, (n - 1) // 3
    median = ordered[middle] if n % 2 else 0.5 * ordered[middle - 1] + 0.5 * ordered[middle]
    assert torch.equal(coordinate_median(rows), median)
    assert torch.equal(trimmed_mean(rows, trimmed), ordered[trimmed : n - trimmed].mean(0))
    chosen = torch.arange(0, n, 2)
    assert torch.equal(subset_mean(rows, chosen), wide[chosen].mean(0))


def test_sums_over_pieces_against_numpy():
    rows = torch.randn(3, MANY // 3 + 70, generator=torch.Generator().manual_seed(3))
    wide = rows.double().numpy()
    np.testing.assert_allclose(gram_matrix(rows).numpy(), wide @ wide.T, rtol=1e-12, atol=1e-9)
    order = torch.tensor([2, 0, 1])
    assert torch.equal(gram_matrix(rows, order), gram_matrix(rows[order]))
    np.testing.assert_allclose(squared_norms(rows).numpy(), (wide**2).sum(1), rtol=1e-12)
    away = wide - wide[0]
    actual = squared_norms(rows, rows[0]).numpy()
    np.testing.assert_allclose(actual, (away**2).sum(1), rtol=1e-7)
    assert actual[0] == 0


def test_products_of_non_finite_rows_give_no_warning(recwarn):
    gram_matrix(torch.tensor([[torch.inf, 1.0], [1.0, -torch.inf], [torch.nan, 0.0]]))
    assert not recwarn.list


def mean_around_median_by_sorting(column, count):
    """Values tied at the boundary share the remaining weight."""
    middle = np.median(column)
    away = np.abs(column - middle)
    last = np.sort(away)[count - 1]
    inside, tied = column[away < last], column[away == last]
    low, high = np.sort(tied[tied < middle]), np.sort(tied[tied >= middle])
    room = count - len(inside)
    first = np.concatenate([low[:room], high[: max(0, room - len(low))]])
    second = np.concatenate([high[:room], low[: max(0, room - len(high))]])
    return (inside.sum() + 0.5 * first.sum() + 0.5 * second.sum()) / count


def test_distances_of_equal_rows_are_zero():
    """The products of equal rows may differ in the last bits."""
    products = torch.tensor([[0.3, 0.3 - 1e-16], [0.3 - 1e-16, 0.3]], dtype=torch.float64)
    assert squared_distances(products).tolist() == [[0, 0], [0, 0]]
    assert squared_distances(1e-12 * torch.eye(2)).tolist() != [[0, 0], [0, 0]]


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    rows=arrays(np.float64, array_shapes(min_dims=2, max_dims=2, max_side=8), elements=WHOLE),
    data=st.data(),
)
def test_mean_around_median_with_ties(rows, data):
    count = data.draw(st.integers(1, len(rows)))
    expected = [mean_around_median_by_sorting(column, count) for column in rows.T]
    given_rows = torch.from_numpy(rows)
    actual = mean_around_median(given_rows, count)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(mean_around_median(-given_rows, count), -actual, rtol=1e-12)
    again = torch.cat([given_rows + 1, given_rows])
    chosen = torch.arange(len(rows), 2 * len(rows))
    assert torch.equal(mean_around_median(again, count, chosen), actual)


def test_mean_around_median_of_large_values_does_not_overflow():
    rows = torch.tensor([[3e38], [3e38], [-3e38]])
    assert mean_around_median(rows, 1).tolist() == [torch.tensor(3e38).item()]


def test_norm_of_a_row_with_overflowing_squares():
    row = torch.tensor([3.0, 4.0])
    assert row_norm(row * 2.0**64) == 5 * 2.0**64
    assert row_norm(torch.tensor([torch.inf, 1.0])).isinf()
    assert row_norm(torch.tensor([torch.nan, 2.0**64])).isnan()
    assert row_norm(torch.full((2,), 3e38)).isinf(), "the norm is too large itself"
    draws = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(row_norm(draws), torch.linalg.vector_norm(draws))
    assert row_norm(row.double()).dtype == torch.float64
