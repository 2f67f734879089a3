"""Distributions of speeds: quantiles in closed form, and refusals in one sentence."""

import numpy as np
import pytest
import torch
from tables import table_test

from pl_fed import Systems
from pl_fed.systems import (
    ClientProfiles,
    Constant,
    Distribution,
    LogNormal,
    Quantiles,
    UniformRange,
)

SHARES = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)


def test_quantiles_equal_closed_forms():
    scipy_stats = pytest.importorskip("scipy.stats")
    expected = scipy_stats.lognorm(s=0.8, scale=5.0).ppf(SHARES.numpy())
    np.testing.assert_allclose(LogNormal(5.0, 0.8).quantiles(SHARES), expected, rtol=1e-10)
    np.testing.assert_allclose(UniformRange(2, 6).quantiles(SHARES), 2 + 4 * SHARES, rtol=1e-12)
    values = [1.0, 2.0, 2.0, 9.0]
    expected = np.interp(SHARES, np.linspace(0, 1, 4), values)
    np.testing.assert_allclose(Quantiles(values).quantiles(SHARES), expected, rtol=1e-12)
    assert set(Constant(3).quantiles(SHARES).tolist()) == {3.0}


def test_drawn_numbers_have_the_distribution():
    profiles = ClientProfiles(Systems(speed=LogNormal(5.0, 1.0)), 20_000, (), seed=0)
    speeds = profiles.select(torch.arange(20_000), 0)["speed"]
    assert float(speeds.median()) == pytest.approx(5.0, rel=0.05)
    assert float(speeds.log().std()) == pytest.approx(1.0, rel=0.05)


@table_test(
    "make, message",
    [
        (lambda: Constant(-1.0), "`value` to be at least 0, and finite, but got -1.0"),
        (lambda: Constant("x"), "`value` to be a number but got 'x'"),
        (lambda: UniformRange(3, 1), "`high` to be at least `low` = 3 but got 1: exchange them"),
        (lambda: UniformRange(-3, 1), "`low` to be at least 0, and finite, but got -3"),
        (lambda: LogNormal(0.0), "`median` to be above 0, and finite, but got 0.0"),
        (lambda: LogNormal(1.0, -1.0), "`sigma` to be at least 0, and finite, but got -1.0"),
        (lambda: Quantiles([1.0]), "at least two numbers in ascending order but got"),
        (lambda: Quantiles([2.0, 1.0]), "in ascending order but got .2.0, 1.0.: give, for"),
        (lambda: Quantiles(3.0), "`values` to be a list of numbers but got 3.0"),
        (lambda: Quantiles([1.0, float("nan")]), r"`values\[1\]` to be at least 0, and finite"),
    ],
    ids=str,
)
def test_invalid_distributions_are_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


class Backwards(Distribution):
    """Negative speeds."""

    def quantiles(self, shares):
        return -shares


class Scalar(Distribution):
    """One number instead of one for each client."""

    def quantiles(self, shares):
        return shares.sum()


@table_test(
    "options, message",
    [
        ({"speed": -1}, "`federation.systems.speed` to be above 0, and finite but got -1"),
        ({"speed": 0}, "`federation.systems.speed` to be above 0, and finite but got 0"),
        ({"speed": "fast"}, "`federation.systems.speed` to be a number or a distribution of"),
        ({"speed": None}, "`federation.systems.speed` to be a number or a distribution of"),
        ({"speed": True}, "`federation.systems.speed` to be a number or a distribution of"),
        ({"availability": 1.5}, r"`federation.systems.availability` to be in \[0, 1\] but got 1.5"),
        ({"dropout": -0.1}, r"`federation.systems.dropout` to be in \[0, 1\] but got -0.1"),
        ({"upload": float("inf")}, "`federation.systems.upload` to be above 0, and finite but got"),
        ({"jitter": -1.0}, "`federation.systems.jitter` to be at least 0, and finite, but got"),
        ({"policy": "hurry"}, "`federation.systems.policy` to be 'wait', 'drop' or 'partial' but"),
        ({"policy": "drop"}, "`federation.systems.deadline` to be given for the policies drop and"),
        ({"deadline": 1.0}, 'policies drop and partial alone but got 1.0 for "wait": remove it'),
        ({"deadline": 0.0, "policy": "drop"}, "`federation.systems.deadline` to be above 0, and"),
        ({"take_first": 0}, "`federation.systems.take_first` to be at least 1 but got 0"),
        ({"take_first": 2.5}, "`federation.systems.take_first` to be an integer but got 2.5"),
        ({"trace": 3}, "`federation.systems.trace` to be a CSV file but got 3"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Systems(**options)


@table_test(
    "options, message",
    [
        ({"speed": Backwards()}, "to give numbers above 0, and finite but client 0 has -0"),
        (
            {"availability": Constant(2.0)},
            r"to give numbers in \[0, 1\] but client 0 has 2: choose",
        ),
        ({"speed": Scalar()}, r"to give one number for each of 3 clients but got shape \[\]"),
    ],
    ids=str,
)
def test_distributions_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ClientProfiles(Systems(**options), 3, (), seed=0)
