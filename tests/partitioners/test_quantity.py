"""Clients of different sizes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table_test

from pl_fed.partitioners import Quantity

LABELS = torch.arange(10).repeat(1000)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def sizes(num_clients=10, seed=0, labels=LABELS, **options):
    return torch.tensor(
        [len(p) for p in Quantity(**options).split(labels, num_clients, generator(seed))]
    )


def test_sizes_equal_the_dirichlet_draw():
    draw = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator(3))))
    expected = torch.from_numpy(draw.dirichlet(np.full(10, 0.5))) * len(LABELS)
    assert (sizes(seed=3) - expected).abs().max() < 1


def test_sizes_equal_the_lognormal_draw():
    draw = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator(3))))
    weights = torch.from_numpy(draw.lognormal(0.0, 2.0, 10))
    expected = weights / weights.sum() * len(LABELS)
    assert (sizes(seed=3, law="lognormal", sigma=2.0) - expected).abs().max() < 1


@pytest.mark.parametrize("law", ["dirichlet", "lognormal"])
def test_all_clients_have_the_same_class_shares(law):
    for part in Quantity(law, beta=5.0, min_size=200).split(LABELS, 10, generator()):
        shares = LABELS[part].bincount(minlength=10) / len(part)
        assert (shares - 0.1).abs().max() < 5 * (0.09 / len(part)) ** 0.5


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(
    clients=st.integers(1, 12),
    min_size=st.integers(1, 8),
    beta=st.sampled_from([0.01, 0.3, 10.0]),
    seed=st.integers(0, 999),
)
def test_clients_have_at_least_min_size_samples(clients, min_size, beta, seed):
    actual = sizes(clients, seed, torch.zeros(100), beta=beta, min_size=min_size)
    assert actual.sum() == 100
    assert actual.min() >= min_size


def test_reference_draws_from_all_samples():
    parts = Quantity(overlapping=True, min_size=100).split(LABELS, 10, generator(3))
    draw = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator(3))))
    expected = np.maximum(100, (draw.dirichlet(np.full(10, 0.5)) * len(LABELS)).astype(int))
    assert [len(part) for part in parts] == expected.tolist()
    samples = torch.cat(parts)
    assert len(samples.unique()) < len(samples), "some samples are held twice"
    assert all(len(part.unique()) == len(part) for part in parts)


def test_too_few_samples_for_min_size_are_refused():
    with pytest.raises(
        ValueError, match=r"at most the number of samples \(10\) but got 4 x 3 = 12"
    ):
        sizes(4, labels=torch.zeros(10), min_size=3)


@table_test(
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
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Quantity(**arguments)
