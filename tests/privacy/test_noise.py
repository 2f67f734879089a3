"""The noise: independent standard normal float64 numbers, the same in every process."""

import numpy as np
import scipy.stats
import torch

from pl_fed.random import key, normal_row

COUNT = 200_000


def rows(count, length):
    return torch.stack(
        [normal_row(key(3, "privacy noise", round), length) for round in range(count)]
    )


def test_noise_has_the_normal_distribution():
    numbers = normal_row(key(0, "privacy noise", 0), COUNT).numpy()
    assert numbers.dtype == np.float64
    assert abs(numbers.mean()) < 4 / COUNT**0.5
    assert abs(numbers.var() - 1) < 4 * (2 / COUNT) ** 0.5
    assert scipy.stats.kstest(numbers, "norm").pvalue > 0.01
    tail = (np.abs(numbers) > 3.5).mean()
    assert abs(tail - 2 * scipy.stats.norm.sf(3.5)) < 4 * (4.7e-4 / COUNT) ** 0.5


def test_coordinates_are_independent():
    numbers = normal_row(key(1, "privacy noise", 0), COUNT)
    half = COUNT // 2
    lags = [1, 2, 3, 8192, 16384, 16385, half]  # half of a piece is the cosine of its pair
    for lag in lags:
        a, b = numbers[:-lag], numbers[lag:]
        for first, second in ((a, b), (a.square() - 1, (b.square() - 1) / 2)):
            assert abs(float((first * second).mean())) < 5 / (COUNT - lag) ** 0.5


def test_rounds_are_independent():
    noise = rows(60, 2000)
    correlations = torch.corrcoef(noise) - torch.eye(60)
    assert float(correlations.abs().max()) < 5 / 2000**0.5
    sums = noise.sum(1).numpy() / 2000**0.5
    assert scipy.stats.kstest(sums, "norm").pvalue > 0.01


def test_noise_depends_on_seed_purpose_and_round_alone():
    torch.manual_seed(0)
    first = normal_row(key(5, "privacy noise", 7), 10)
    torch.manual_seed(1)
    assert torch.equal(first, normal_row(key(5, "privacy noise", 7), 10))
    for other in (key(6, "privacy noise", 7), key(5, "other", 7), key(5, "privacy noise", 8)):
        assert not torch.isclose(first, normal_row(other, 10)).any()


def test_any_length():
    for length in (0, 1, 2, 5, 16384, 16385, 40001):
        row = normal_row(4, length)
        assert row.shape == (length,)
        assert row.isfinite().all()
