"""A stable cut: new samples and new owners leave all other samples in their parts."""

import pytest
import torch
from small_federations import Given

from pl_fed.data import FederatedData
from pl_fed.data.source import Arrays
from pl_fed.partitioners import IID, ByOwner

PARTS = ("train", "val", "test")


def make(samples, num_clients=None, partitioner=None, official=None, **settings):
    """Return data of samples (owner, number), in this order; the number is the input."""
    names = sorted({owner for owner, _ in samples})
    client = torch.tensor([names.index(owner) for owner, _ in samples])
    x = torch.tensor([[float(number)] for _, number in samples])
    y = torch.zeros(len(samples), dtype=torch.int64)
    arrays = Arrays(x, y, client, official, num_classes=2, names=names)
    settings = {
        "stable_cut": True,
        "seed": 0,
        "test_fraction": 0.3,
        "val_fraction": 0.2,
        **settings,
    }
    return FederatedData(Given(arrays), partitioner, num_clients, **settings).clients


def parts(data):
    """Return the part of each (owner, number)."""
    return {
        (owner, int(data.inputs[sample])): part
        for part in PARTS
        for client, (owner,) in enumerate(data.owners)
        for sample in data.part(part).samples(client).tolist()
    }


def samples(**sizes):
    return [(owner, number) for owner, size in sizes.items() for number in range(size)]


def test_grown_data_and_new_owners_leave_parts_as_they_are():
    before = parts(make(samples(bob=40, dan=25)))
    grown = samples(ann=30, bob=40, cy=10, dan=25) + [("bob", 40 + k) for k in range(20)]
    after = parts(make(grown))
    assert len(after) == 125
    assert {sample: after[sample] for sample in before} == before
    assert {part for (owner, number), part in after.items() if owner == "bob" and number >= 40} == {
        *PARTS
    }


@pytest.mark.slow
def test_fractions_are_those_asked_for():
    data = make(samples(ann=2000, bob=2000))
    shares = [float(data.part(part).sizes.sum()) / 4000 for part in PARTS]
    assert shares == pytest.approx([0.5, 0.2, 0.3], abs=0.02)
    few = samples(ann=100, bob=100)
    assert parts(make(few)) != parts(make(few, seed=1))
    own = [parts(data)["ann", k] == parts(data)["bob", k] for k in range(100)]
    assert not all(own), "each owner has its own draw"


def test_each_owner_has_a_training_sample():
    data = make([(f"{k:03}", 0) for k in range(200)], test_fraction=0.5, val_fraction=0.4)
    assert data.train.sizes.tolist() == [1] * 200


def test_owners_keep_their_parts_in_other_groups():
    numbers = samples(ann=20, bob=20, cy=20, dan=20)
    test_samples = [
        sorted(make(numbers, number, ByOwner()).test.index.tolist()) for number in (2, 4)
    ]
    assert test_samples[0] == test_samples[1]


def test_only_parts_that_are_cut_are_drawn():
    official = torch.tensor([0] * 30 + [2] * 10)
    data = make(samples(ann=40), official=official, split="official")
    assert data.test.index.tolist() == list(range(30, 40))
    assert 0 < len(data.val.index) < 15


def test_default_cut_is_by_exact_fractions():
    data = make(samples(ann=40, bob=20), stable_cut=False)
    assert data.test.sizes.tolist() == [12, 6]
    assert not data.keeps_parts
    assert make(samples(ann=40)).keeps_parts


def test_partitioners_by_labels_are_refused():
    with pytest.raises(ValueError, match=r"`data\.stable_cut` to be false .* but got IID"):
        make(samples(ann=40), 2, IID())
