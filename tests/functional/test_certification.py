"""CRFL's votes and certified radius: by hand, and against scipy."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch.testing import assert_close

from pl_fed.functional.certification import (
    confidence_bounds,
    count_votes,
    crfl_radius,
    top_shares,
)

MNIST = {  # of the authors' code: 20 clients, two attackers, an attack in round 70
    "bounds": [2 + 0.1 * t for t in range(71, 76)],
    "std": 0.01,
    "final_std": 0.01,
    "attacker_shares": [1 / 20] * 2,
    "scale": 100.0,
    "lr": 0.001,
    "local_steps": 30,
    "poisoned_share": 5 / 100,
    "lipschitz": math.sqrt(2 + 2 * 3 + 3**2),
}


def radius(top, second, **changes):
    return crfl_radius(torch.tensor([top]), torch.tensor([second]), **{**MNIST, **changes})[0]


def test_radius_equals_the_value_by_hand():
    assert float(radius(0.9, 0.1)) == pytest.approx(0.081716, abs=1e-6)


def test_radius_equals_scipy():
    draw = np.random.default_rng(0)
    for _ in range(50):
        top, second = sorted(draw.uniform(size=2))[::-1]
        shares, bounds = draw.uniform(size=3), draw.uniform(0.1, 2.0, size=4)
        std, final_std = draw.uniform(0.1, 1.0, size=2)
        stds = np.array([std, std, std, final_std])
        settings = {"scale": 3.0, "lr": 0.2, "local_steps": 7, "poisoned_share": 0.3}
        numerator = -np.log(1 - (top**0.5 - second**0.5) ** 2) * std**2
        denominator = 2 * 3 * 7**2 * 1.7**2 * (shares**2).sum() * 3.0**2 * 0.2**2 * 0.3**2
        denominator *= (2 * norm.cdf(bounds / stds) - 1).prod()
        expected = math.sqrt(numerator / denominator)
        result = crfl_radius(
            torch.tensor([top]),
            torch.tensor([second]),
            bounds=bounds.tolist(),
            std=std,
            final_std=final_std,
            attacker_shares=shares.tolist(),
            lipschitz=1.7,
            **settings,
        )
        assert float(result) == pytest.approx(expected, rel=1e-9)


def test_radius_is_zero_without_a_majority_and_infinite_with_all_votes():
    assert radius(0.5, 0.5) == 0.0
    assert radius(0.2, 0.5) == 0.0
    assert radius(1.0, 0.0) == math.inf


def test_votes_and_shares_equal_those_by_hand():
    votes = count_votes(torch.tensor([[0, 2, 1], [0, 1, 1], [1, 2, 1], [0, 2, 1]]), 3)
    assert votes.tolist() == [[3, 1, 0], [0, 1, 3], [0, 4, 0]]
    top, second = top_shares(votes)
    assert top.tolist() == [0.75, 0.75, 1.0]
    assert second.tolist() == [0.25, 0.25, 0.0]


def test_bounds_hold_with_the_given_probability():
    """Of 2,000 experiments with 100 votes each, at most a share of 5 % misses p_A = 0.7."""
    draws = np.random.default_rng(0).binomial(100, 0.7, size=2000) / 100
    top = torch.from_numpy(draws)
    lower, upper = confidence_bounds(top, 1 - top, 100, 0.05)
    assert (lower > 0.7).double().mean() <= 0.05
    assert (upper < 0.3).double().mean() <= 0.05
    assert_close(top - lower, torch.full_like(top, math.sqrt(math.log(20) / 200)))
