"""Mathematics of privacy: splits of a budget, and the banded factorisation against matrices."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pl_fed.functional.aggregation import squared_norms
from pl_fed.functional.privacy import (
    clip_factors,
    exact_squared_norms,
    move_clip_norm,
    next_correlated_row,
    root_coefficients,
    sensitivity_of_bands,
    split_noise,
)


def banded_matrix(band, rounds):
    """Return C, lower triangular and Toeplitz."""
    matrix = torch.zeros(rounds, rounds, dtype=torch.float64)
    for place, coefficient in enumerate(root_coefficients(min(band, rounds))):
        matrix += coefficient * torch.ones(rounds - place, dtype=torch.float64).diag(-place)
    return matrix


def patterns(rounds, separation):
    """Yield all sets of rounds in which consecutive ones are at least ``separation`` apart."""
    for count in range(1, rounds + 1):
        for chosen in itertools.combinations(range(rounds), count):
            if all(b - a >= separation for a, b in itertools.pairwise(chosen)):
                yield list(chosen)


def test_square_root_of_the_prefix_sums():
    root = banded_matrix(9, 9)
    torch.testing.assert_close(root @ root, torch.ones(9, 9, dtype=torch.float64).tril())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("separation", "rounds"), [(1, 6), (2, 9), (2, 13), (3, 10), (3, 16), (5, 9), (20, 7)]
)
def test_sensitivity_is_the_largest_over_all_participation_patterns(separation, rounds):
    """A client's clipped rows may have any directions; disjoint columns make them orthogonal."""
    matrix = banded_matrix(separation, rounds)
    gram = matrix.T @ matrix
    largest = max(float(gram[chosen][:, chosen].sum()) for chosen in patterns(rounds, separation))
    assert sensitivity_of_bands(separation, rounds) == pytest.approx(math.sqrt(largest))
    for chosen in patterns(rounds, separation):
        block = gram[chosen][:, chosen]
        assert torch.equal(block, block.diag().diag()), "no direction matters"


def test_rows_of_correlated_noise_solve_the_triangular_system():
    noise = torch.randn(8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    coefficients, rows = root_coefficients(3), []
    for row in noise:
        previous = list(reversed(rows))[:2]
        rows.append(next_correlated_row(coefficients, row, previous))
    expected = torch.linalg.solve_triangular(banded_matrix(3, 8), noise, upper=False)
    torch.testing.assert_close(torch.stack(rows), expected)


def test_correlated_noise_disturbs_the_sum_of_all_updates_less():
    """At the same privacy, the mean squared error of the prefix sums is smaller."""
    rounds, separation = 40, 10
    prefix = torch.ones(rounds, rounds, dtype=torch.float64).tril()
    errors = [
        float((prefix @ banded_matrix(band, rounds).inverse()).square().sum())
        * sensitivity_of_bands(band, rounds) ** 2
        / (1 if band > 1 else separation)  # a client of 10 groups takes part in 4 rounds, not 40
        for band in (separation, 1)
    ]
    assert errors[0] < 0.8 * errors[1]


@settings(deadline=None)
@given(noise=st.floats(0.1, 50), share=st.floats(0.001, 0.999))
def test_split_noise_keeps_the_budget(noise, share):
    update, count = split_noise(noise, share)
    assert 1 / update**2 + 1 / (2 * count) ** 2 == pytest.approx(1 / noise**2)
    assert 1 / (2 * count) ** 2 == pytest.approx(share / noise**2)


@pytest.mark.slow
@settings(deadline=None)
@given(norms=st.lists(st.floats(0, 1e150), min_size=1), clip_norm=st.floats(1e-6, 1e6))
def test_clipped_norms_are_at_most_the_clipping_norm(norms, clip_norm):
    rows = torch.tensor(norms, dtype=torch.float64)
    factors = clip_factors(rows.square(), clip_norm)
    assert (rows * factors <= clip_norm * (1 + 1e-12)).all()
    assert torch.equal(
        factors[rows < clip_norm * (1 - 1e-12)],
        torch.ones_like(factors)[rows < clip_norm * (1 - 1e-12)],
    )


def test_adaptive_clipping_norm_converges_to_the_quantile():
    norms = torch.linspace(0.1, 10, 1000)
    clip_norm = 0.01
    for _ in range(500):
        below = float((norms <= clip_norm).double().mean())
        clip_norm = move_clip_norm(clip_norm, below, 0.7, 0.2)
    assert clip_norm == pytest.approx(float(norms.quantile(0.7)), rel=0.02)


@pytest.mark.parametrize("columns", [1, 5, (1 << 17) + 3])
def test_squared_norm_of_a_row_depends_on_the_row_alone(columns):
    rows = torch.randn(4, columns, generator=torch.Generator().manual_seed(0))
    norms = exact_squared_norms(rows)
    torch.testing.assert_close(norms, rows.double().square().sum(1), rtol=1e-12, atol=0.0)
    assert all(exact_squared_norms(rows[k : k + 1]).equal(norms[k : k + 1]) for k in range(4))
    rows[1, 0], rows[2, -1] = math.nan, math.inf
    assert exact_squared_norms(rows).isfinite().tolist() == [True, False, False, True]
    assert exact_squared_norms(rows[:0]).shape == (0,)
    wide = rows[[0, 3]].double()
    assert exact_squared_norms(wide).equal(squared_norms(wide))
