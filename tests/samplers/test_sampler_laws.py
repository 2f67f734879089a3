"""The laws of the samplers, against closed forms and numpy."""

import numpy as np
import pytest
import torch

from pl_fed.samplers import All, BySize, Uniform

DRAWS = 6000


def frequencies(sampler, sizes):
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(len(sizes))
    for _ in range(DRAWS):
        counts[sampler.sample(len(sizes), sizes, generator)] += 1
    return counts.numpy() / DRAWS


def test_all_takes_all():
    assert All().sample(4, torch.ones(4), torch.Generator()).tolist() == [0, 1, 2, 3]
    assert All().size_of_cohort(7) == 7


def test_uniform_takes_everybody_equally_often_whatever_the_sizes():
    got = frequencies(Uniform(3), torch.tensor([1, 10, 100, 1000, 1, 1]))
    # Standard deviation of a frequency: sqrt(.25 / 6000) = .0065.
    np.testing.assert_allclose(got, 0.5, atol=4.5 * 0.0065)


def test_by_size_of_one_is_proportional():
    got = frequencies(BySize(1), torch.tensor([1, 2, 3, 4]))
    np.testing.assert_allclose(got, [0.1, 0.2, 0.3, 0.4], atol=4.5 * 0.0065)


def test_by_size_of_two_has_the_closed_form():
    sizes = torch.tensor([1, 2, 7])
    p = sizes.double().numpy() / 10
    # First, or second after one of the others: p_i + Σ_{j≠i} p_j p_i / (1 - p_j).
    wanted = [p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(3) if j != i) for i in range(3)]
    np.testing.assert_allclose(frequencies(BySize(2), sizes), wanted, atol=4.5 * 0.0065)


def test_by_size_has_the_law_of_numpys_choice():
    sizes = torch.tensor([5, 10, 20, 40, 80, 160])
    p = sizes.double().numpy() / float(sizes.sum())
    numpy_generator = np.random.default_rng(0)
    wanted = np.zeros(6)
    for _ in range(DRAWS):
        wanted[numpy_generator.choice(6, size=3, replace=False, p=p)] += 1 / DRAWS
    np.testing.assert_allclose(frequencies(BySize(3), sizes), wanted, atol=4.5 * 0.0092)


def test_by_size_never_takes_a_client_without_samples():
    sizes = torch.tensor([0, 3, 0, 5])
    assert BySize(2).sample(4, sizes, torch.Generator()).tolist() == [1, 3]
    with pytest.raises(ValueError, match=r"clients with samples \(2\) but got 3"):
        BySize(3).sample(4, sizes, torch.Generator())


def test_by_size_wants_a_size_for_each_client():
    with pytest.raises(ValueError, match=r"shape \[4\] but got \[3\]"):
        BySize(2).sample(4, torch.ones(3), torch.Generator())
