"""Contract of every sampler of the package."""

import importlib
import inspect
import pkgutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table_test

import pl_fed.samplers
from pl_fed.samplers import All, BySize, FixedCohort, Sampler, Uniform


def public_classes():
    for module in pkgutil.iter_modules(pl_fed.samplers.__path__):
        if not module.name.startswith("_"):
            name = f"pl_fed.samplers.{module.name}"
            for _, member in inspect.getmembers(importlib.import_module(name), inspect.isclass):
                if member.__module__ == name and not member.__name__.startswith("_"):
                    yield member


CONCRETE = [
    member
    for member in public_classes()
    if issubclass(member, Sampler) and not inspect.isabstract(member)
]
each_sampler = pytest.mark.parametrize("sampler", CONCRETE)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def test_walk_finds_the_samplers():
    assert {All, BySize, Uniform} <= set(CONCRETE)


@pytest.mark.parametrize("member", list(public_classes()))
def test_every_public_class_is_exported(member):
    assert getattr(pl_fed.samplers, member.__name__, None) is member


@pytest.mark.slow
@each_sampler
@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 10**6), min_size=10, max_size=60).map(torch.tensor),
    seed=st.integers(0, 2**31),
)
def test_cohort_has_distinct_ids_in_ascending_order(sampler, sizes, seed):
    before = sizes.clone()
    cohort = sampler().sample(len(sizes), sizes, generator(seed))
    assert cohort.dtype == torch.int64
    if sampler.has_fixed_size:
        assert cohort.shape == (sampler().size_of_cohort(len(sizes)),)
    assert (cohort.diff() > 0).all()
    assert cohort.ge(0).all()
    assert cohort.lt(len(sizes)).all()
    assert torch.equal(cohort, sampler().sample(len(sizes), sizes, generator(seed)))
    assert torch.equal(sizes, before)


@each_sampler
def test_draws_do_not_touch_the_global_generator(sampler):
    before = torch.get_rng_state()
    sampler().sample(20, torch.arange(1, 21), generator(0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("sampler", [BySize, Uniform])
def test_other_seeds_give_other_cohorts(sampler):
    sizes = torch.ones(50)
    cohorts = {tuple(sampler().sample(50, sizes, generator(s)).tolist()) for s in range(20)}
    assert len(cohorts) == 20


@table_test("sampler", [BySize, Uniform])
def test_a_cohort_larger_than_the_federation_is_refused(sampler):
    message = r"`cohort_size` to be at most the number of clients \(9\) but got 10\."
    with pytest.raises(ValueError, match=message):
        sampler(10).size_of_cohort(9)
    with pytest.raises(ValueError, match=message):
        sampler(10).sample(9, torch.ones(9), generator(0))


@pytest.mark.parametrize("sampler", [BySize, Uniform])
def test_default_cohort_is_10_clients_or_all_of_fewer(sampler):
    assert [sampler().size_of_cohort(clients) for clients in (1, 8, 10, 11)] == [1, 8, 10, 10]
    assert sampler().sample(8, torch.ones(8), generator(0)).tolist() == [*range(8)]
    for seed in range(5):
        cohorts = [s.sample(30, torch.ones(30), generator(seed)) for s in (sampler(), sampler(10))]
        assert torch.equal(*cohorts)


@pytest.mark.parametrize("sampler", [BySize, Uniform])
def test_cohort_size_is_an_integer_of_at_least_one(sampler):
    for size in (0, -2):
        with pytest.raises(ValueError, match=f"at least 1 but got {size}"):
            sampler(size)
    for size in (1.5, True, "3"):
        with pytest.raises(TypeError, match="`cohort_size` to be an integer but got"):
            sampler(size)


@table_test(
    ("cohort", "words"),
    [
        ([0, 1], r"drew \[0, 1\] \(torch.int64\)"),
        ([0, 1, 2, 3], r"drew \[0, 1, 2, 3\]"),
        ([0, 1, 1], r"drew \[0, 1, 1\]"),
        ([0, 1, 5], r"drew \[0, 1, 5\]"),
        ([-1, 1, 2], r"drew \[-1, 1, 2\]"),
        ([0.0, 1.0, 2.0], r"drew \[0.0, 1.0, 2.0\] \(torch.float32\)"),
        ([[0, 1, 2]], r"drew \[\[0, 1, 2\]\]"),
    ],
)
def test_invalid_cohort_is_refused(cohort, words):
    class Own(FixedCohort):
        def sample(self, num_clients, sizes, generator):
            return torch.tensor(cohort)

    with pytest.raises(ValueError, match=f"`sampler` to draw 3 different ids of 0 to 4, .*{words}"):
        Own(3).draw(5, torch.ones(5), torch.Generator())
    cohort = [4, 0, 2]
    assert Own(3).draw(5, torch.ones(5), torch.Generator()).tolist() == cohort
