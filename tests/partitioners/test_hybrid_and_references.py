"""Half and half; and the splits of the references, in which clients share samples."""

import numpy as np
import pytest
import torch

from pl_fed.partitioners import ByOwner, Dirichlet, Hybrid, Shards

LABELS = torch.arange(10).repeat(700)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def classes(part):
    return LABELS[part].unique().numel()


def test_first_half_has_few_classes_and_second_half_all():
    parts = Hybrid(classes_per_client=2).split(LABELS, 10, generator())
    assert [classes(part) for part in parts[:5]] == [2] * 5
    assert sum(len(part) for part in parts[:5]) == sum(len(part) for part in parts[5:]) == 3500
    assert torch.cat(parts).sort().values.equal(torch.arange(7000))
    assert max(classes(part) for part in parts[5:]) == 10


def test_first_half_of_an_odd_number_of_clients_is_larger():
    parts = Hybrid(classes_per_client=2).split(LABELS, 11, generator())
    assert [classes(part) for part in parts[:6]] == [2] * 6
    assert sum(len(part) for part in parts[:6]) == 7000 * 6 // 11


def test_reference_uses_all_samples_twice():
    """10 clients with q = 2: 5 of them have two whole classes each, or one of them twice."""
    parts = Hybrid(2, overlapping=True, min_size=100).split(LABELS, 10, generator())
    assert [len(part) for part in parts[:5]] == [1400] * 5
    assert torch.cat(parts[:5]).unique().numel() == 7000
    assert torch.cat(parts).unique().numel() < sum(len(part) for part in parts)


def test_shards_of_the_reference_have_equal_sizes():
    """10 clients, q = 2: two shards of 350 in each class, and each client draws two of the 20."""
    parts = Shards(2, reference=True).split(LABELS, 10, generator())
    assert [len(part) for part in parts] == [700] * 10
    assert torch.cat(parts).sort().values.equal(torch.arange(7000))
    held = torch.stack([LABELS[part].bincount(minlength=10) for part in parts])
    assert set(held.unique().tolist()) <= {0, 350, 700}
    several = [Shards(2, reference=True).split(LABELS, 10, generator(s)) for s in range(20)]
    assert any(classes(part) == 1 for parts in several for part in parts), "a class drawn twice"


def test_shards_of_the_reference_are_consecutive_samples():
    for part in Shards(2, reference=True).split(LABELS, 10, generator()):
        for label in LABELS[part].unique():
            places = torch.isin((label == LABELS).nonzero().flatten(), part).nonzero().flatten()
            halves = {int(places.min()) // 350, int(places.max()) // 350}
            assert len(places) == 350 * len(halves), "one half of the class, or both"


def test_classes_with_too_few_samples_for_the_shards_of_the_reference_are_refused():
    labels = torch.tensor([0] + [1] * 1000)
    for split in (Shards(1, reference=True), Hybrid(1, overlapping=True)):
        match = r"at most the number of shards that the reference cuts the 2 classes into \(\d+, as"
        with pytest.raises(ValueError, match=match):
            split.split(labels, 10 if isinstance(split, Shards) else 20, generator())


def test_some_shards_of_the_reference_are_unused():
    """7 clients, q = 2: ⌈14/10⌉ = 2 shards a class, and 6 of 20 shards are unused."""
    parts = Shards(2, reference=True).split(LABELS, 7, generator())
    assert [len(part) for part in parts] == [700] * 7
    assert torch.cat(parts).unique().numel() == 4900


def test_client_is_tested_on_all_samples_of_its_classes():
    test_labels = torch.arange(10).repeat(30)
    split = Shards(2, whole_test_classes=True).split_matching
    train, test = split(LABELS, test_labels, 20, generator())
    for trained, tested in zip(train, test, strict=True):
        assert len(tested) == 60
        assert test_labels[tested].unique().equal(LABELS[trained].unique())
    other, _ = Shards(2).split_matching(LABELS, test_labels, 20, generator())
    assert all(torch.equal(a, b) for a, b in zip(train, other))


def test_dirichlet_of_the_reference_equals_the_numpy_draw():
    parts = Dirichlet(0.5, overlapping=True).split(LABELS, 10, generator(3))
    draw = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator(3))))
    expected = torch.from_numpy(draw.dirichlet(np.full(10, 0.5), size=10) * 700).long()
    held = torch.stack([LABELS[part].bincount(minlength=10) for part in parts], dim=1)
    assert held.equal(expected)
    samples = torch.cat(parts)
    assert samples.unique().numel() < len(samples)
    assert all(part.unique().numel() == len(part) for part in parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clients", "beta", "min_size"),
    [(150, 0.5, 10), (170, 0.5, 10), (150, 5.0, 10), (900, 0.5, 1), (50, 1e-3, 30), (2, 0.5, 800)],
)
def test_overlapping_clients_draw_further_samples_up_to_min_size(clients, beta, min_size):
    labels = torch.arange(10).repeat(180)
    parts = Dirichlet(beta, min_size, overlapping=True).split(labels, clients, generator())
    assert min(len(part) for part in parts) >= min_size
    assert all(part.unique().numel() == len(part) for part in parts)


def test_small_client_draws_further_samples_of_its_largest_shares():
    counts, shares = torch.tensor([[0, 5], [1, 2], [0, 9]]), torch.tensor([[0.1], [0.5], [0.4]])
    class_sizes = torch.tensor([9, 2, 9])
    drawn = Dirichlet(min_size=4, overlapping=True)._add_samples(
        counts, shares.expand(3, 2).double(), class_sizes
    )
    assert drawn.tolist() == [[0, 5], [2, 2], [2, 9]], "until there are no more of the second class"


@pytest.mark.parametrize("clients", [1, 3, 4, 8])
def test_few_clients_of_the_reference_leave_samples_unused(clients):
    parts = Shards(2, reference=True).split(LABELS, clients, generator())
    shard = 350 if clients == 8 else 700  # of 10 classes, ⌈2 · 8 / 10⌉ = 2 each
    assert [len(part) for part in parts] == [2 * shard] * clients
    assert torch.cat(parts).unique().numel() == 2 * shard * clients
    halves = Hybrid(overlapping=True).split(LABELS, clients, generator())
    assert len(halves) == clients


def test_error_of_a_half_names_the_half():
    with pytest.raises(ValueError, match=r"got 4 x 2 = 8 in the first half of the 8 clients\.$"):
        Hybrid().split(LABELS, 8, generator())


def test_owners_are_divided_evenly():
    owners = torch.arange(13).repeat_interleave(torch.arange(1, 14)) * 3
    parts = ByOwner().split(owners, 4, generator())
    assert sorted(owners[part].unique().numel() for part in parts) == [3, 3, 3, 4]
    assert torch.cat(parts).sort().values.equal(torch.arange(len(owners)))
    assert sum(owners[part].unique().numel() for part in parts) == 13, "none is cut in two"
    assert all(part.equal(part.sort().values) for part in parts)


def test_more_clients_than_owners_are_refused():
    match = r"at most the number of owners \(2\) but got 3"
    with pytest.raises(ValueError, match=match):
        ByOwner().split(torch.tensor([1, 1, 5, 5]), 3, generator())
