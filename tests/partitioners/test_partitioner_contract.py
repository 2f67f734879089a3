"""What every partitioner of the package must keep, whoever writes the next one."""

import importlib
import inspect
import pkgutil
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table_test

import pl_fed.partitioners
from pl_fed.partitioners import (
    IID,
    ByOwner,
    Dirichlet,
    DittoFashion,
    FlwrDatasets,
    Hybrid,
    Partitioner,
    Quantity,
    Shards,
)


def public_classes():
    for module in pkgutil.iter_modules(pl_fed.partitioners.__path__):
        if not module.name.startswith("_"):
            name = f"pl_fed.partitioners.{module.name}"
            for _, member in inspect.getmembers(importlib.import_module(name), inspect.isclass):
                if member.__module__ == name and not member.__name__.startswith("_"):
                    yield member


CONCRETE = [
    member
    for member in public_classes()
    if issubclass(member, Partitioner)
    and not inspect.isabstract(member)
    and member is not FlwrDatasets  # it wraps a partitioner of another package
]
LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=60).map(torch.tensor)
# With so many samples per class and at most so many clients, every partitioner succeeds.
FEASIBLE = st.tuples(st.integers(5, 9), st.integers(10, 20), st.integers(5, 10))
SEEDS = st.integers(0, 2**31)
each_partitioner = pytest.mark.parametrize("partitioner", CONCRETE)
# Those that need more: owners as many as clients, twice as many clients as classes there are.
undemanding = pytest.mark.parametrize(
    "partitioner", [kind for kind in CONCRETE if kind not in (ByOwner, Hybrid)]
)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def assert_partition(parts, num_samples):
    assert all(part.dtype == torch.int64 and part.ndim == 1 for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(num_samples))


def test_walk_finds_the_partitioners():
    assert {IID, Shards, Dirichlet, DittoFashion, Quantity, Hybrid, ByOwner} <= set(CONCRETE)


@pytest.mark.parametrize("member", list(public_classes()))
def test_every_public_class_is_exported(member):
    assert getattr(pl_fed.partitioners, member.__name__, None) is member


@pytest.mark.slow
@each_partitioner
@settings(deadline=None, max_examples=60)
@given(labels=LABELS, num_clients=st.integers(1, 12), seed=SEEDS)
def test_parts_are_disjoint_complete_and_not_empty(partitioner, labels, num_clients, seed):
    before = labels.clone()
    try:
        parts = partitioner().split(labels, num_clients, generator(seed))
    except ValueError as refusal:
        error = str(refusal)
    else:
        error = "Expected no error but got 0"
        assert len(parts) == num_clients
        assert_partition(parts, len(labels))
        assert min(len(part) for part in parts) >= 1
        assert all(torch.equal(part, part.sort().values) for part in parts)
    assert re.match(r"Expected .* but got .*\d", error)
    assert torch.equal(labels, before)


@undemanding
@settings(deadline=None, max_examples=25)
@given(shape=FEASIBLE, seed=SEEDS)
def test_enough_samples_of_every_class_are_partitioned(partitioner, shape, seed):
    num_classes, per_class, num_clients = shape
    labels = torch.arange(num_classes).repeat(per_class)
    parts = partitioner().split(labels, num_clients, generator(seed))
    assert len(parts) == num_clients
    assert_partition(parts, len(labels))
    assert min(len(part) for part in parts) >= 1


@undemanding
@settings(deadline=None, max_examples=25)
@given(shape=FEASIBLE, test_labels=LABELS, seed=SEEDS)
def test_split_matching_is_disjoint_and_complete(partitioner, shape, test_labels, seed):
    num_classes, per_class, num_clients = shape
    labels = torch.arange(num_classes).repeat(per_class)
    test_before = test_labels.clone()
    train, test = partitioner().split_matching(labels, test_labels, num_clients, generator(seed))
    assert len(train) == len(test) == num_clients
    assert_partition(train, len(labels))
    assert_partition(test, len(test_labels))
    assert torch.equal(test_labels, test_before)


@undemanding
def test_split_matching_follows_the_class_shares_of_the_client(partitioner):
    labels, test_labels = torch.arange(10).repeat(600), torch.arange(10).repeat(100)
    train, test = partitioner().split_matching(labels, test_labels, 8, generator(3))
    for own_train, own_test in zip(train, test, strict=True):
        wanted = labels[own_train].bincount(minlength=10) / 6
        got = test_labels[own_test].bincount(minlength=10)
        assert (got - wanted).abs().max() < 1


@each_partitioner
def test_seed_determines_the_split(partitioner):
    labels = torch.arange(10).repeat(50)
    test_labels = torch.arange(10).repeat(10)

    def draw(seed):
        parts = partitioner().split_matching(labels, test_labels, 10, generator(seed))
        return [part.tolist() for part in parts[0] + parts[1]]

    assert draw(1) == draw(1)
    draws = generator(1)
    partitioner().split(labels, 10, draws)
    if not torch.equal(draws.get_state(), generator(1).get_state()):  # a split without draws is one
        assert draw(1) != draw(2)


@each_partitioner
def test_draws_do_not_touch_the_global_generators(partitioner):
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    partitioner().split(torch.arange(10).repeat(50), 10, generator(0))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.random.get_state()[1].tolist() == numpy_before  # noqa: NPY002


@each_partitioner
@pytest.mark.parametrize("num_clients", [0, -1, 5])
def test_impossible_numbers_of_clients_are_refused(partitioner, num_clients):
    with pytest.raises(ValueError, match=rf"`num_clients`.*{num_clients}"):
        partitioner().split(torch.zeros(4, dtype=torch.int64), num_clients, generator(0))


@each_partitioner
@pytest.mark.parametrize("num_clients", [2.0, True, "3"])
def test_number_of_clients_must_be_an_integer(partitioner, num_clients):
    with pytest.raises(TypeError, match="num_clients"):
        partitioner().split(torch.arange(10).repeat(5), num_clients, generator(0))


@each_partitioner
def test_empty_test_set_is_refused(partitioner):
    with pytest.raises(ValueError, match="test_labels"):
        partitioner().split_matching(
            torch.arange(10).repeat(9), torch.empty(0, dtype=torch.int64), 9, generator(0)
        )


@table_test("partitioner", [Shards, Dirichlet, DittoFashion])
def test_label_based_splits_refuse_other_targets(partitioner):
    with pytest.raises(TypeError, match=r"class ids but got torch\.float32"):
        partitioner().split(torch.rand(100), 5, generator(0))
    with pytest.raises(ValueError, match=r"\[100, 2\]"):
        partitioner().split(torch.ones(100, 2, dtype=torch.int64), 5, generator(0))


@pytest.mark.parametrize("partitioner", [Shards, Dirichlet])
def test_class_ids_may_start_at_any_integer(partitioner):
    labels = torch.tensor([-1, 1]).repeat(30)
    assert_partition(partitioner().split(labels, 4, generator(0)), 60)
