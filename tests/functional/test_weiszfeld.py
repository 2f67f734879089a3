"""The geometric median from products: closed forms; the aggregator's tests hold the rest."""

from itertools import permutations

import pytest
import torch
from torch.testing import assert_close

from pl_fed.functional.weiszfeld import weiszfeld


def shares(n):
    return torch.full((n,), 1 / n, dtype=torch.float64)


def median_of(rows, **options):
    weights = weiszfeld(rows @ rows.T, shares(len(rows)), 1e-6, **options)
    assert_close(weights.sum().item(), 1.0, rtol=1e-12, atol=0)
    return weights @ rows


@pytest.mark.parametrize("side", [1e-3, 1.0, 1e12])
def test_the_corners_of_a_simplex_weigh_alike(side):
    weights = weiszfeld(side**2 * torch.eye(5, dtype=torch.float64), shares(5), 1e-6)
    assert_close(weights, shares(5))


def test_one_row_is_its_own_median():
    assert weiszfeld(torch.tensor([[4.0]], dtype=torch.float64), shares(1), 1e-6).tolist() == [1.0]


def test_opposite_rows_have_their_centre():
    """Of a convex quadrangle it is the point where the diagonals cross."""
    rows = torch.tensor([[-1.0, 0.0], [5.0, 0.0], [0.0, -2.0], [0.0, 3.0]], dtype=torch.float64)
    assert median_of(rows).norm() < 1e-5


def test_a_start_at_a_row_that_is_not_the_median_is_left():
    """The mean is the second row; the median of the line is the third."""
    rows = torch.tensor([[-6.0], [0.0], [1.0], [2.0], [3.0]], dtype=torch.float64)
    assert rows.mean() == 0
    assert_close(median_of(rows).item(), 1.0, rtol=0, atol=1e-5)


@pytest.mark.parametrize("far", [1e3, 1e15, 1e30])
def test_rows_that_lie_far_off_leave_the_others_their_digits(far):
    """Two of five: the other three, seen from the Fermat point, against their two directions."""
    rows = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.4, 0.8]], dtype=torch.float64)
    away = far * torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    found = median_of(torch.cat([rows, away]))
    assert (found - median_of(rows)).norm() < 2 / far + 1e-8


def test_a_step_from_zero_weighs_by_the_inverse_norms():
    rows = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    weights = weiszfeld(rows @ rows.T, shares(2), 1e-6, num_steps=1, start_at_zero=True)
    assert_close(weights, torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))


def test_within_the_smoothing_all_distances_are_alike():
    rows = torch.tensor([[0.0], [1.0], [5.0]], dtype=torch.float64)
    weights = weiszfeld(rows @ rows.T, shares(3), smoothing=100.0)
    assert_close(weights, shares(3))


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_the_row_that_counts_most_is_reached_in_whatever_order(order):
    """Distances to it are exact: the products have no digits left for what is nearer than 1e-6."""
    rows = torch.tensor([[42.0, 85.0], [0.0, 0.0]], dtype=torch.float64)[order]
    shares = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)[order]
    found = weiszfeld(rows @ rows.T, shares, smoothing=1e-6) @ rows
    # where the pull of the one, 1/3, is what the other's is at 1e-6 / 2
    direction = torch.tensor([42.0, 85.0], dtype=torch.float64)
    expected = 0.5e-6 * direction / direction.norm()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)


def test_a_mean_beside_two_rows_that_agree():
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
