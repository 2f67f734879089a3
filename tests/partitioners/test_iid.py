import pytest
import torch

from pl_fed.partitioners import IID


def test_sizes_differ_by_at_most_one():
    parts = IID().split(torch.zeros(23), 5, torch.Generator().manual_seed(0))
    assert sorted(len(part) for part in parts) == [4, 4, 5, 5, 5]


def test_real_valued_targets_of_any_shape_are_accepted():
    train, test = IID().split_matching(
        torch.rand(12, 3), torch.rand(6, 3), 3, torch.Generator().manual_seed(0)
    )
    assert [len(part) for part in train] == [4, 4, 4]
    assert [len(part) for part in test] == [2, 2, 2]


@pytest.mark.slow
def test_every_client_receives_every_sample_equally_often():
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(4, 8)
    for _ in range(4000):
        for client, part in enumerate(IID().split(torch.zeros(8), 4, generator)):
            counts[client, part] += 1
    # Binomial(4000, 1/4): standard deviation 27.
    assert (counts - 1000).abs().max() < 5 * 27.4


def test_unshuffled_parts_are_consecutive_slices():
    parts = IID(shuffle=False).split(torch.zeros(7), 3, torch.Generator())
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4], [5, 6]]
