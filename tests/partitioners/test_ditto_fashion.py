import os

import numpy as np
import pytest
import torch

from pl_fed.partitioners import DittoFashion

LABELS = torch.arange(10).repeat_interleave(600)
TEST_LABELS = torch.arange(10).repeat_interleave(100)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def fashion_labels():
    root = os.environ.get("PL_FED_DATA")
    if root is None or not os.path.isdir(os.path.join(root, "FashionMNIST", "raw")):
        pytest.skip("PL_FED_DATA names no folder with FashionMNIST/raw")
    from torchvision.datasets import FashionMNIST

    return tuple(FashionMNIST(root, train=train, download=False).targets for train in (True, False))


def figures(parts, num_samples):
    sizes = np.array([len(part) for part in parts])
    uses = torch.cat(parts).bincount(minlength=num_samples)
    return {
        "total": sizes.sum(),
        "min": sizes.min(),
        "median": np.median(sizes),
        "max": sizes.max(),
        "used twice": int((uses == 2).sum()),
        "used more": int((uses > 2).sum()),
    }


def test_sizes_of_the_reference_on_the_real_labels(fashion_labels):
    train, test = DittoFashion(overlapping=True, reference_seed=233).split_matching(
        *fashion_labels, 500, generator()
    )
    assert figures(train, 60_000) == {
        "total": 61_251, "min": 31, "median": 88, "max": 1378, "used twice": 2426, "used more": 0,
    }  # fmt: skip
    assert figures(test, 10_000) == {
        "total": 11_254, "min": 7, "median": 17, "max": 231, "used twice": 1278, "used more": 0,
    }  # fmt: skip
    # The share of the data that the reference's attackers hold, at 20, 50 and 80 % of the clients.
    sizes = np.array([len(part) for part in train])
    for num_corrupted, share in ((100, 0.197), (250, 0.491), (400, 0.781)):
        state = np.random.RandomState(1234567)
        corrupted = state.choice(500, num_corrupted, replace=False)
        assert sizes[corrupted].sum() / sizes.sum() == pytest.approx(share, abs=0.0005)


def test_disjoint_clients_on_the_real_labels_have_the_sizes_of_the_reference(fashion_labels):
    overlapping = DittoFashion(overlapping=True, reference_seed=233)
    disjoint = DittoFashion(reference_seed=233)
    sizes = [
        np.array([len(part) for part in partitioner.split(fashion_labels[0], 500, generator())])
        for partitioner in (overlapping, disjoint)
    ]
    assert sizes[1].sum() == 60_000
    assert np.corrcoef(*sizes)[0, 1] > 0.98


@pytest.mark.parametrize("overlapping", [False, True])
def test_client_u_has_consecutive_classes_from_class_u(overlapping):
    partitioner = DittoFashion(classes_per_client=3, overlapping=overlapping)
    train, test = partitioner.split_matching(LABELS, TEST_LABELS, 12, generator())
    for client in range(12):
        wanted = sorted((client + j) % 10 for j in range(3))
        assert LABELS[train[client]].unique().tolist() == wanted
        assert set(TEST_LABELS[test[client]].unique().tolist()) <= set(wanted)


def test_slices_are_consecutive_and_restart():
    partitioner = DittoFashion(classes_per_client=1, overlapping=True)
    pools = [torch.arange(5)]
    parts = partitioner._slices(pools, np.array([[1.5], [1.0], [0.2], [3.0]]))
    # int(1.5) + 1 = 2 and int(1) + 1 = 2 samples; 1 more ends the class; 4 begin again.
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4], [0, 1, 2, 3]]


def test_slice_beyond_the_end_restarts():
    partitioner = DittoFashion(classes_per_client=1, overlapping=True)
    parts = partitioner._slices([torch.arange(5)], np.array([[2.0], [2.0], [1.0]]))
    assert [part.tolist() for part in parts] == [[0, 1, 2], [0, 1, 2], [3, 4]]


def test_overlapping_counts_follow_the_formula():
    state = np.random.RandomState(7)
    sizes = state.lognormal(3, 1, 20) + 10
    shares = state.lognormal(1, 1, (20, 5))
    wanted = [
        (
            int(p / row.sum() * 6000 * size / sizes.sum()),
            int(p / row.sum() * 1000 * size / sizes.sum()),
        )
        for size, row in zip(sizes, shares)
        for p in row
    ]
    train, test = DittoFashion(overlapping=True, reference_seed=7).split_matching(
        LABELS, TEST_LABELS, 20, generator()
    )
    got = [
        (int((LABELS[a] == (u + j) % 10).sum()), int((TEST_LABELS[b] == (u + j) % 10).sum()))
        for u, (a, b) in enumerate(zip(train, test))
        for j in range(5)
    ]
    # A class with fewer samples than the count is used completely.
    assert got == [(min(a + 1, 600), min(b + 1, 100)) for a, b in wanted]


def test_reference_seed_draws_sizes_and_generator_draws_samples():
    partitioner = DittoFashion(reference_seed=233)
    first, second = (partitioner.split(LABELS, 20, generator(seed)) for seed in (1, 2))
    assert [len(part) for part in first] == pytest.approx([len(part) for part in second], abs=5)
    assert not all(torch.equal(a, b) for a, b in zip(first, second))
    overlapping = DittoFashion(reference_seed=233, overlapping=True)
    first, second = (overlapping.split(LABELS, 20, generator(seed)) for seed in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_errors_name_the_values():
    with pytest.raises(ValueError, match="got 0 clients and 600 samples for class number 7"):
        DittoFashion().split(LABELS, 3, generator())
    with pytest.raises(ValueError, match="got 5 clients and 4 samples"):
        DittoFashion().split(torch.arange(10).repeat(4), 10, generator())
    with pytest.raises(ValueError, match=r"number of classes \(10\) but got 11"):
        DittoFashion(11).split(LABELS, 20, generator())
    with pytest.raises(ValueError, match="`classes_per_client` to be at least 1 but got 0"):
        DittoFashion(0)
    with pytest.raises(ValueError, match="`reference_seed` to be at least 0 but got -1"):
        DittoFashion(reference_seed=-1)
    with pytest.raises(
        ValueError, match="`reference_seed` to be at most 4294967295 but got 429496"
    ):
        DittoFashion(reference_seed=2**32)


def test_largest_reference_seed():
    parts = DittoFashion(reference_seed=2**32 - 1).split(LABELS, 20, generator())
    assert sum(len(part) for part in parts) == len(LABELS)
