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
    found = draws.normal(size=shape)
    if kind == "skewed":
        found = np.exp(3 * found)
    elif kind == "far from 0":
        found += 1e4
    elif kind == "one far off":
        found[0] *= 1e6
    return found


def forge(attack, honest, context=None):
    honest = torch.from_numpy(honest)
    known = torch.arange(len(honest))
    context = context or RoundContext(observed=known, attackers=torch.tensor([99]))
    return attack.forge(honest, torch.zeros(1, honest.shape[1]).double(), context)[0].numpy()


def same(mine, theirs):
    np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12 * np.abs(theirs).max())


@every_shape
@every_kind
def test_sign_flipping_equals_inner_product_manipulation_with_factor_1(shape, kind):
    honest = rows(shape, kind)
    same(forge(InnerProductManipulation(1.0), honest), byzfl.SignFlipping()(honest))


@every_shape
@every_kind
@pytest.mark.parametrize("factor", [0.1, 2.0, -3.0])
def test_inner_product_manipulation_equals_byzfl(shape, kind, factor):
    honest = rows(shape, kind)
    theirs = byzfl.InnerProductManipulation(tau=factor)(honest)
    same(forge(InnerProductManipulation(factor), honest), theirs)


@every_shape
@every_kind
@pytest.mark.parametrize("factor", [0.0, 1.5, 10.0])
def test_a_little_is_enough_equals_byzfl(shape, kind, factor):
    """On the other side of the mean, and by the sample's standard deviation."""
    honest, n = rows(shape, kind), shape[0]
    theirs = byzfl.ALittleIsEnough(tau=factor)(honest)
    same(forge(ALittleIsEnough(-factor * (n / (n - 1)) ** 0.5), honest), theirs)


@every_shape
@pytest.mark.parametrize("client", [0, 1])
def test_mimic_equals_byzfl(shape, client):
    honest = rows(shape, "random")
    same(forge(Mimic(client), honest), byzfl.Mimic(epsilon=client)(honest))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (Median(), lambda f: byzfl.Median()),
        (TrimmedMean(), byzfl.TrMean),
        (Krum(), byzfl.Krum),
    ],
    ids=["median", "trimmed mean", "Krum"],
)
def test_search_does_at_least_the_harm_of_byzfl(mine, theirs, seed):
    """Another search than ByzFL's, with as many trials: it does not do much less."""
    n, f = 15, 4
    draws = np.random.default_rng(seed)
    honest = draws.normal(size=(n - f, 12)) + 0.3
    mean = honest.mean(0)
    defence = theirs(f)
    clients, known = torch.arange(n), torch.arange(n - f)
    about = RoundContext(num_byzantine=f, clients=clients)

    def merged(forged):
        together = torch.cat([torch.from_numpy(honest), forged])
        return mine(together, torch.ones(n), about)

    context = RoundContext(
        clients=clients, observed=known, attackers=clients[-f:], simulate_merge=merged
    )

    def harm(forged):
        together = np.concatenate([honest, np.repeat(forged[None], f, axis=0)])
        return np.linalg.norm(defence(together) - mean)

    own = torch.zeros(f, 12, dtype=torch.float64)
    kind = byzfl.Optimal_InnerProductManipulation
    best = kind(agg=defence, pre_agg_list=[], f=f, evals=20)(honest)
    attack = InnerProductManipulation("search", trials=20)
    found = attack.forge(torch.from_numpy(honest), own, context)[0].numpy()
    assert harm(found) > 0.98 * harm(best)
