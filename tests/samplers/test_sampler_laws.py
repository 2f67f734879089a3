"""The laws of the samplers, against closed forms and numpy."""

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pl_fed.samplers._distinct
from pl_fed.samplers import All, BySize, Uniform

DRAWS = 6000


def frequencies(sampler, sizes):
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(len(sizes))
    for _ in range(DRAWS):
        counts[sampler.sample(len(sizes), sizes, generator)] += 1
    return counts.numpy() / DRAWS


def test_all_selects_every_client():
    assert All().sample(4, torch.ones(4), torch.Generator()).tolist() == [0, 1, 2, 3]
    assert All().size_of_cohort(7) == 7


def test_uniform_selects_clients_equally_often_for_any_sizes():
    got = frequencies(Uniform(3), torch.tensor([1, 10, 100, 1000, 1, 1]))
    # Standard deviation of a frequency: sqrt(.25 / 6000) = .0065.
    np.testing.assert_allclose(got, 0.5, atol=4.5 * 0.0065)


@pytest.mark.slow
def test_by_size_selects_single_clients_in_proportion():
    got = frequencies(BySize(1), torch.tensor([1, 2, 3, 4]))
    np.testing.assert_allclose(got, [0.1, 0.2, 0.3, 0.4], atol=4.5 * 0.0065)


@pytest.mark.slow
def test_by_size_selects_two_clients_by_the_closed_form():
    sizes = torch.tensor([1, 2, 7])
    p = sizes.double().numpy() / 10
    # First, or second after one of the others: p_i + Σ_{j≠i} p_j p_i / (1 - p_j).
    wanted = [p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(3) if j != i) for i in range(3)]
    np.testing.assert_allclose(frequencies(BySize(2), sizes), wanted, atol=4.5 * 0.0065)


@pytest.mark.slow
def test_by_size_has_the_law_of_numpys_choice():
    sizes = torch.tensor([5, 10, 20, 40, 80, 160])
    p = sizes.double().numpy() / float(sizes.sum())
    numpy_generator = np.random.default_rng(0)
    wanted = np.zeros(6)
    for _ in range(DRAWS):
        wanted[numpy_generator.choice(6, size=3, replace=False, p=p)] += 1 / DRAWS
    np.testing.assert_allclose(frequencies(BySize(3), sizes), wanted, atol=4.5 * 0.0092)


def test_by_size_never_selects_a_client_without_samples():
    sizes = torch.tensor([0, 3, 0, 5])
    assert BySize(2).sample(4, sizes, torch.Generator()).tolist() == [1, 3]
    with pytest.raises(ValueError, match=r"clients with samples \(2\) but got 3"):
        BySize(3).sample(4, sizes, torch.Generator())


def test_by_size_needs_a_size_for_every_client():
    with pytest.raises(ValueError, match=r"shape \[4\] but got \[3\]"):
        BySize(2).sample(4, torch.ones(3), torch.Generator())


# Few of many clients, which are not all looked at


@pytest.fixture
def sample_as_large_federation(monkeypatch):
    monkeypatch.setattr(pl_fed.samplers._distinct, "_LARGE_FEDERATION", 10)


@settings(deadline=None, max_examples=30)
@given(data=st.data(), seed=st.integers(0, 2**31), sampler=st.sampled_from([Uniform, BySize]))
def test_small_cohort_of_a_large_federation_is_distinct_and_ascending(data, seed, sampler):
    num_clients = data.draw(st.integers(10_001, 30_000))
    cohort_size = data.draw(st.integers(1, num_clients // 10))
    sizes = torch.randint(0, 9, (num_clients,), generator=torch.Generator().manual_seed(seed))
    cohort = sampler(cohort_size).sample(num_clients, sizes, torch.Generator().manual_seed(seed))
    assert cohort.dtype == torch.int64
    assert cohort.shape == (cohort_size,)
    assert (cohort.diff() > 0).all()
    assert 0 <= int(cohort[0]) <= int(cohort[-1]) < num_clients
    assert sampler is Uniform or (sizes[cohort] > 0).all()


def test_small_cohort_of_a_million_clients_draws_few_numbers():
    """A million clients, but not a million numbers are drawn: the generator has hardly moved."""
    generator = torch.Generator().manual_seed(0)
    assert len(Uniform(100).sample(1_000_000, torch.empty(0), generator)) == 100
    other = torch.Generator().manual_seed(0)
    torch.randint(1_000_000, (200,), generator=other)
    assert torch.equal(generator.get_state(), other.get_state())


def pairs(sampler, sizes, draws=6_000):
    """Count how often every pair is the cohort."""
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(len(sizes), len(sizes))
    for _ in range(draws):
        first, second = sampler.sample(len(sizes), sizes, generator).tolist()
        counts[first, second] += 1
    return counts


@pytest.mark.usefixtures("sample_as_large_federation")
@pytest.mark.slow
def test_uniform_selects_pairs_of_many_clients_equally_often():
    above = torch.triu_indices(20, 20, 1)
    counted = pairs(Uniform(2), torch.ones(20))[above[0], above[1]]
    assert int(counted.sum()) == 6_000, "the first is below the second"
    assert scipy.stats.chisquare(counted.numpy()).pvalue > 0.01


@pytest.mark.slow
@pytest.mark.usefixtures("sample_as_large_federation")
@pytest.mark.parametrize("large", [3, 10**6], ids=["drawn", "looked at"])
def test_by_size_selects_pairs_of_many_clients_by_the_closed_form(large):
    sizes = torch.tensor([large, 0, *range(1, 19)])
    p = sizes.double() / sizes.sum()
    # One of them first, the other among the rest: p_i p_j / (1 − p_i) + p_j p_i / (1 − p_j).
    wanted = p[:, None] * p / (1 - p[:, None]) + p[:, None] * p / (1 - p)
    chosen = (wanted.triu(1) > 0).nonzero().unbind(1)
    counted = pairs(BySize(2), sizes)
    assert int(counted[chosen].sum()) == 6_000
    wanted, counted = wanted[chosen] * 6_000, counted[chosen].double()
    seldom = wanted < 5
    wanted = torch.cat([wanted[~seldom], wanted[seldom].sum().view(1) + 1e-9])
    counted = torch.cat([counted[~seldom], counted[seldom].sum().view(1) + 1e-9])
    test = scipy.stats.chisquare(
        counted.numpy(), wanted.numpy() * (counted.sum() / wanted.sum()).item()
    )
    assert test.pvalue > 0.01


@pytest.mark.usefixtures("sample_as_large_federation")
def test_by_size_of_many_clients_without_samples():
    with pytest.raises(ValueError, match=r"clients with samples \(0\) but got 2"):
        BySize(2).sample(20, torch.zeros(20, dtype=torch.int64), torch.Generator())
    sampler, sizes = BySize(2), torch.tensor([0] * 18 + [1, 5])
    assert sampler.sample(20, sizes, torch.Generator()).tolist() == [18, 19]
    assert sampler.sample(20, sizes.flip(0), torch.Generator()).tolist() == [0, 1], "others' sizes"
    with pytest.raises(ValueError, match=r"clients with samples \(1\) but got 2"):
        sampler.sample(20, torch.tensor([0] * 19 + [5]), torch.Generator())


def test_cohorts_of_small_federations_are_stable():
    """Seeds are stable: these numbers are those of the first release."""

    def draw(sampler, sizes):
        return sampler.sample(len(sizes), sizes, torch.Generator().manual_seed(5))[:3].tolist()

    assert draw(Uniform(3), torch.ones(10_000)) == [517, 3411, 4871]
    assert draw(Uniform(1001), torch.ones(10_009)) == [2, 21, 24]
    assert draw(BySize(3), torch.arange(10_000)) == [1871, 8100, 8121]
