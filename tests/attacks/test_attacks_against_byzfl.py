"""Where ByzFL means the same by an attack, it gives the same numbers."""

import numpy as np
import pytest
import torch
from byzfl_reference import byzfl

from pl_fed.aggregators import Krum, Median, TrimmedMean
from pl_fed.attacks import ALittleIsEnough, InnerProductManipulation, Mimic
from pl_fed.types import RoundContext

SHAPES = [(2, 1), (5, 3), (9, 40), (20, 7)]
every_shape = pytest.mark.parametrize("shape", SHAPES)
every_kind = pytest.mark.parametrize("kind", ["random", "skewed", "far from 0", "one far off"])


def rows(shape, kind):
    draws = np.random.default_rng(shape[0])
    table = draws.normal(size=shape)
    if kind == "skewed":
        table = np.exp(3 * table)
    elif kind == "far from 0":
        table += 1e4
    elif kind == "one far off":
        table[0] *= 1e6
    return table


def forge(attack, honest, context=None):
    honest = torch.from_numpy(honest)
    observed = torch.arange(len(honest))
    context = context or RoundContext(observed=observed, attackers=torch.tensor([99]))
    return attack.forge(honest, torch.zeros(1, honest.shape[1]).double(), context)[0].numpy()


def check_equal(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max())


@every_shape
@every_kind
def test_sign_flipping_equals_inner_product_manipulation_with_factor_1(shape, kind):
    honest = rows(shape, kind)
    check_equal(forge(InnerProductManipulation(1.0), honest), byzfl.SignFlipping()(honest))


@every_shape
@every_kind
@pytest.mark.parametrize("factor", [0.1, 2.0, -3.0])
def test_inner_product_manipulation_equals_byzfl(shape, kind, factor):
    honest = rows(shape, kind)
    expected = byzfl.InnerProductManipulation(tau=factor)(honest)
    check_equal(forge(InnerProductManipulation(factor), honest), expected)


@every_shape
@every_kind
@pytest.mark.parametrize("factor", [0.0, 1.5, 10.0])
def test_a_little_is_enough_equals_byzfl(shape, kind, factor):
    """On the other side of the mean, and by the sample's standard deviation."""
    honest, n = rows(shape, kind), shape[0]
    expected = byzfl.ALittleIsEnough(tau=factor)(honest)
    check_equal(forge(ALittleIsEnough(-factor * (n / (n - 1)) ** 0.5), honest), expected)


@every_shape
@pytest.mark.parametrize("client", [0, 1])
def test_mimic_equals_byzfl(shape, client):
    honest = rows(shape, "random")
    check_equal(forge(Mimic(client), honest), byzfl.Mimic(epsilon=client)(honest))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("aggregator", "defence_by_byzfl"),
    [
        (Median(), lambda f: byzfl.Median()),
        (TrimmedMean(), byzfl.TrMean),
        (Krum(), byzfl.Krum),
    ],
    ids=["median", "trimmed mean", "Krum"],
)
def test_search_does_at_least_the_harm_of_byzfl(aggregator, defence_by_byzfl, seed):
    """Another search than ByzFL's, with as many trials: it does not do much less."""
    n, f = 15, 4
    draws = np.random.default_rng(seed)
    honest = draws.normal(size=(n - f, 12)) + 0.3
    mean = honest.mean(0)
    defence = defence_by_byzfl(f)
    clients, observed = torch.arange(n), torch.arange(n - f)
    about = RoundContext(num_byzantine=f, clients=clients)

    def merged(forged):
        together = torch.cat([torch.from_numpy(honest), forged])
        return aggregator(together, torch.ones(n), about)

    context = RoundContext(
        clients=clients, observed=observed, attackers=clients[-f:], simulate_merge=merged
    )

    def harm(forged):
        together = np.concatenate([honest, np.repeat(forged[None], f, axis=0)])
        return np.linalg.norm(defence(together) - mean)

    own = torch.zeros(f, 12, dtype=torch.float64)
    kind = byzfl.Optimal_InnerProductManipulation
    best = kind(agg=defence, pre_agg_list=[], f=f, evals=20)(honest)
    attack = InnerProductManipulation("search", trials=20)
    forged_row = attack.forge(torch.from_numpy(honest), own, context)[0].numpy()
    assert harm(forged_row) > 0.98 * harm(best)
