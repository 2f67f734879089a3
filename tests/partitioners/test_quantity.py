"""Clients of different sizes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pl_fed.partitioners import Quantity

LABELS = torch.arange(10).repeat(1000)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def sizes(num_clients=10, seed=0, labels=LABELS, **how):
    return torch.tensor(
        [len(p) for p in Quantity(**how).split(labels, num_clients, generator(seed))]
    )


def test_sizes_are_those_of_the_dirichlet_draw():
    draw = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator(3))))
    expected = torch.from_numpy(draw.dirichlet(np.full(10, 0.5))) * len(LABELS)
    assert (sizes(seed=3) - expected).abs().max() < 1


def test_sizes_are_those_of_the_lognormal_draw():
    draw = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator(3))))
    weights = torch.from_numpy(draw.lognormal(0.0, 2.0, 10))
    expected = weights / weights.sum() * len(LABELS)
    assert (sizes(seed=3, law="lognormal", sigma=2.0) - expected).abs().max() < 1


@pytest.mark.parametrize("law", ["dirichlet", "lognormal"])
def test_everybody_has_the_same_mix(law):
    for part in Quantity(law, beta=5.0, min_size=200).split(LABELS, 10, generator()):
        shares = LABELS[part].bincount(minlength=10) / len(part)
        assert (shares - 0.1).abs().max() < 5 * (0.09 / len(part)) ** 0.5


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(
    clients=st.integers(1, 12),
    least=st.integers(1, 8),
    beta=st.sampled_from([0.01, 0.3, 10.0]),
    seed=st.integers(0, 999),
)
def test_nobody_has_less_than_the_least(clients, least, beta, seed):
    found = sizes(clients, seed, torch.zeros(100), beta=beta, min_size=least)
    assert found.sum() == 100
    assert found.min() >= least


def test_the_reference_draws_from_all_samples():
    parts = Quantity(overlapping=True, min_size=100).split(LABELS, 10, generator(3))
    draw = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator(3))))
    expected = np.maximum(100, (draw.dirichlet(np.full(10, 0.5)) * len(LABELS)).astype(int))
    assert [len(part) for part in parts] == expected.tolist()
    everyone = torch.cat(parts)
    assert len(everyone.unique()) < len(everyone), "some samples are held twice"
    assert all(len(part.unique()) == len(part) for part in parts)


def test_too_few_samples_for_all():
    with pytest.raises(
        ValueError, match=r"at most the number of samples \(10\) but got 4 x 3 = 12"
    ):
        sizes(4, labels=torch.zeros(10), min_size=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"law": "zipf"}, "`law` to be 'dirichlet' or 'lognormal' but got 'zipf'"),
        ({"beta": 0.0}, "`beta` to be above 0"),
        ({"beta": 1e308}, r"`beta` to be at most 1e\+300 but got 1e\+308"),
        ({"sigma": -1.0}, "`sigma` to be above 0"),
        ({"sigma": 1000.0}, "`sigma` to be at most 100 but got 1000.0"),
        ({"min_size": 0}, "`min_size` to be at least 1"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        Quantity(**arguments)
