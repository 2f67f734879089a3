"""The sparse projection against the dense matrix that it stands for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import table_test

from pl_fed.functional.projection import SparseProjection

lengths = st.integers(1, 40).flatmap(lambda long: st.tuples(st.just(long), st.integers(1, long)))


def projection_matrix(projection, long):
    """P, [short, long]."""
    return projection.double()(torch.eye(long, dtype=torch.float64)).T


@pytest.mark.slow
@given(lengths, st.integers(0, 5))
def test_rows_are_orthonormal_and_columns_have_one_entry(both, seed):
    long, short = both
    matrix = projection_matrix(SparseProjection(long, short, seed), long)
    assert matrix.shape == (short, long)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(short, dtype=torch.float64))
    assert ((matrix != 0).sum(0) == 1).all()
    sizes = (matrix != 0).sum(1)
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.slow
@given(lengths)
def test_projection_and_lift_are_products_with_the_matrix_and_its_transpose(both):
    long, short = both
    projection = SparseProjection(long, short)
    matrix = projection_matrix(projection, long)
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 3, long, generator=draw, dtype=torch.float64)
    few = torch.randn(2, 3, short, generator=draw, dtype=torch.float64)
    torch.testing.assert_close(projection(rows), rows @ matrix.T)
    torch.testing.assert_close(projection.lift(few), few @ matrix)
    torch.testing.assert_close(projection(projection.lift(few)), few)
    torch.testing.assert_close(projection(rows[0, 0]), matrix @ rows[0, 0])


def test_projection_to_equal_length_is_a_signed_permutation():
    matrix = projection_matrix(SparseProjection(6, 6), 6)
    assert set(matrix.unique().tolist()) == {-1.0, 0.0, 1.0}


def test_projection_depends_on_the_seed_only():
    rows = torch.randn(50, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    first = SparseProjection(50, 7, seed=3)(rows)
    torch.manual_seed(2)
    assert torch.equal(first, SparseProjection(50, 7, seed=3)(rows))
    assert not torch.equal(first, SparseProjection(50, 7, seed=4)(rows))
    assert not SparseProjection(50, 7).state_dict()


def test_projection_under_vmap_equals_projection_of_all_rows():
    projection = SparseProjection(11, 4).double()
    rows = torch.randn(5, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(torch.vmap(projection)(rows), projection(rows))
    few = projection(rows)
    assert torch.equal(torch.vmap(projection.lift)(few), projection.lift(few))


@pytest.mark.slow
def test_squared_lengths_are_preserved_on_average():
    """E ‖P x‖² = ‖x‖² · short / long over the seeds, within 4 standard errors (of 0.5 / 20)."""
    x = torch.randn(60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ratios = [
        float(SparseProjection(60, 6, seed).double()(x).square().sum() / x.square().sum())
        for seed in range(400)
    ]
    assert sum(ratios) / len(ratios) == pytest.approx(0.1, rel=0.1)


@table_test(
    ("long", "short", "match"),
    [
        (0, 1, "`long` to be at least 1 but got 0"),
        (3, 0, "`short` to be at least 1 but got 0"),
        (3, 4, "`short` to be at most `long` = 3 but got 4"),
    ],
)
def test_invalid_lengths_are_refused(long, short, match):
    with pytest.raises(ValueError, match=f"Expected argument {match}"):
        SparseProjection(long, short)
