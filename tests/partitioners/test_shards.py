import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pl_fed.partitioners import Shards

MNIST_LIKE = torch.arange(10).repeat(60)


def list_classes(parts, labels):
    return [labels[part].unique().tolist() for part in parts]


@settings(deadline=None, max_examples=60)
@given(
    num_classes=st.integers(1, 8),
    num_clients=st.integers(1, 15),
    classes_per_client=st.integers(1, 8),
    seed=st.integers(0, 2**31),
)
@pytest.mark.slow
def test_clients_have_exactly_q_balanced_classes(
    num_classes, num_clients, classes_per_client, seed
):
    places = num_clients * classes_per_client
    if classes_per_client > num_classes or places < num_classes:
        return
    labels = torch.arange(num_classes).repeat(20)
    parts = Shards(classes_per_client).split(
        labels, num_clients, torch.Generator().manual_seed(seed)
    )
    held = list_classes(parts, labels)
    assert [len(classes) for classes in held] == [classes_per_client] * num_clients
    for label in range(num_classes):
        holders = sum(label in classes for classes in held)
        assert holders in (places // num_classes, -(-places // num_classes))
        sizes = {int((labels[part] == label).sum()) for part in parts} - {0}
        assert max(sizes) - min(sizes) <= 1


def test_setting_of_flame_gives_two_shards_of_half_a_class():
    # 10 clients, q = 2, 10 classes of 60: every class has two holders with 30 samples each.
    parts = Shards(2).split(MNIST_LIKE, 10, torch.Generator().manual_seed(1))
    assert [len(part) for part in parts] == [60] * 10
    assert all(MNIST_LIKE[part].bincount().max() == 30 for part in parts)


def test_clients_with_one_class():
    parts = Shards(1).split(MNIST_LIKE, 10, torch.Generator().manual_seed(1))
    assert sorted(classes[0] for classes in list_classes(parts, MNIST_LIKE)) == list(range(10))


def test_clients_with_all_classes():
    parts = Shards(10).split(MNIST_LIKE, 7, torch.Generator().manual_seed(1))
    assert list_classes(parts, MNIST_LIKE) == [list(range(10))] * 7


def test_rare_class_goes_to_fewer_clients():
    labels = torch.tensor([0] * 40 + [1] * 40 + [2])
    parts = Shards(1).split(labels, 9, torch.Generator().manual_seed(0))
    held = [label for classes in list_classes(parts, labels) for label in classes]
    assert (held.count(0), held.count(1), held.count(2)) == (4, 4, 1)


def test_pairs_of_classes_are_random():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(4).repeat(10)
    pairs = {
        tuple(list_classes(Shards(2).split(labels, 2, generator), labels)[0]) for _ in range(200)
    }
    assert len(pairs) == 6


def test_errors_name_the_values():
    generator = torch.Generator()
    with pytest.raises(ValueError, match=r"number of classes \(10\) but got 3 x 2 = 6"):
        Shards(2).split(MNIST_LIKE, 3, generator)
    with pytest.raises(ValueError, match=r"number of classes \(10\) but got 11"):
        Shards(11).split(MNIST_LIKE, 10, generator)
    with pytest.raises(ValueError, match=r"\(4: one client per sample\) but got 3 x 2 = 6"):
        Shards(2).split(torch.tensor([0, 0, 0, 0, 1]), 3, generator)
    with pytest.raises(ValueError, match="`classes_per_client` to be at least 1 but got 0"):
        Shards(0)
    with pytest.raises(TypeError, match=r"integer but got 1\.5"):
        Shards(1.5)
