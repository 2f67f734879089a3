"""The geometric median from products: closed forms; the aggregator's tests hold the rest."""

from itertools import permutations

import pytest
import torch
from torch.testing import assert_close

from pl_fed.functional.weiszfeld import weiszfeld


def shares(n):
    return torch.full((n,), 1 / n, dtype=torch.float64)


def geometric_median(rows, **options):
    weights = weiszfeld(rows @ rows.T, shares(len(rows)), 1e-6, **options)
    assert_close(weights.sum().item(), 1.0, rtol=1e-12, atol=0)
    return weights @ rows


@pytest.mark.parametrize("side", [1e-3, 1.0, 1e12])
def test_corners_of_a_simplex_have_equal_weights(side):
    weights = weiszfeld(side**2 * torch.eye(5, dtype=torch.float64), shares(5), 1e-6)
    assert_close(weights, shares(5))


def test_median_of_a_single_row_is_the_row():
    assert weiszfeld(torch.tensor([[4.0]], dtype=torch.float64), shares(1), 1e-6).tolist() == [1.0]


def test_median_of_opposite_rows_is_their_centre():
    """The median of a convex quadrangle is the crossing of its diagonals."""
    rows = torch.tensor([[-1.0, 0.0], [5.0, 0.0], [0.0, -2.0], [0.0, 3.0]], dtype=torch.float64)
    assert geometric_median(rows).norm() < 1e-5


def test_iteration_leaves_a_start_at_a_row():
    """The mean is the second row; the median of the line is the third."""
    rows = torch.tensor([[-6.0], [0.0], [1.0], [2.0], [3.0]], dtype=torch.float64)
    assert rows.mean() == 0
    assert_close(geometric_median(rows).item(), 1.0, rtol=0, atol=1e-5)


@pytest.mark.parametrize("far", [1e3, 1e15, 1e30])
def test_distant_rows_do_not_reduce_the_precision(far):
    """Two of five: the other three, seen from the Fermat point, against their two directions."""
    rows = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.4, 0.8]], dtype=torch.float64)
    away = far * torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    actual = geometric_median(torch.cat([rows, away]))
    assert (actual - geometric_median(rows)).norm() < 2 / far + 1e-8


def test_first_step_from_zero_weights_by_inverse_norms():
    rows = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    weights = weiszfeld(rows @ rows.T, shares(2), 1e-6, num_steps=1, start_at_zero=True)
    assert_close(weights, torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))


def test_distances_within_the_smoothing_have_equal_weights():
    rows = torch.tensor([[0.0], [1.0], [5.0]], dtype=torch.float64)
    weights = weiszfeld(rows @ rows.T, shares(3), smoothing=100.0)
    assert_close(weights, shares(3))


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_median_at_the_heaviest_row_in_any_order(order):
    """Distances to it are exact: the products resolve nothing below 1e-6."""
    rows = torch.tensor([[42.0, 85.0], [0.0, 0.0]], dtype=torch.float64)[order]
    shares = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)[order]
    actual = weiszfeld(rows @ rows.T, shares, smoothing=1e-6) @ rows
    # where the pull of the one, 1/3, is what the other's is at 1e-6 / 2
    direction = torch.tensor([42.0, 85.0], dtype=torch.float64)
    expected = 0.5e-6 * direction / direction.norm()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-12)


def test_mean_between_equal_rows():
    """Three steps from 0, in any order of the rows, against the same by coordinates."""
    rows = torch.tensor([0.0, 0.0, 1.0, 3.0, 3.0], dtype=torch.float64)
    z = 0.0
    for _ in range(3):
        nearer = 1 / (rows - z).abs().clamp(min=1e-6)
        z = float(nearer @ rows / nearer.sum())
    for order in permutations(range(5)):
        moved = rows[list(order), None]
        fifths = shares(5)
        weights = weiszfeld(moved @ moved.T, fifths, 1e-6, num_steps=3, start_at_zero=True)
        assert float(weights @ moved) == pytest.approx(z, rel=1e-12)
