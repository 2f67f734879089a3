"""Data modules: partition, training and test parts, normalization and root samples."""

import math
import warnings
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pandas
import pytest
import scipy.stats
import torch
from tables import table_test
from torch import nn
from torchvision.transforms import v2

from pl_fed.data import Arrays, DataSource, Digits, FederatedData
from pl_fed.data.batches import Batches, BatchRule
from pl_fed.data.module import ClientBatches
from pl_fed.data.source import count_classes
from pl_fed.partitioners import IID, ByOwner, Dirichlet, Shards


class Made(DataSource):
    """Arrays of a test."""

    def __init__(self, x, y, **others):
        self.arrays = {"inputs": x, "targets": y, **others}

    def load(self):
        return Arrays(**self.arrays)


PARTS = ("train", "val", "test")


def number_samples(samples, classes=2, **others):
    """Samples with their number as input."""
    x = torch.arange(samples, dtype=torch.float32).view(-1, 1)
    return Made(x, torch.arange(samples) % classes, num_classes=classes, **others)


def make_module(dataset, partitioner=None, num_clients=None, **others):
    partitioner = partitioner or (IID() if num_clients else None)
    return FederatedData(dataset, partitioner, num_clients, **{"seed": 0, **others})


def split_clients(*arguments, **others):
    return make_module(*arguments, **others).clients


def ids(clients, part):
    return [clients.part(part).samples(k).tolist() for k in range(clients.num_clients)]


def all_ids(clients, *parts):
    return sorted(i for part in parts for samples in ids(clients, part) for i in samples)


# Whose the samples are


@pytest.mark.parametrize("partitioner", [IID(), Shards(2), Dirichlet(0.3, min_size=5)])
def test_own_split_is_disjoint_and_complete(partitioner):
    clients = split_clients(Digits(), partitioner, 12)
    assert all_ids(clients, "train", "val", "test") == list(range(1797))
    for samples in zip(*(ids(clients, part) for part in PARTS)):
        assert len(set().union(*samples)) == sum(map(len, samples))


@pytest.mark.parametrize(("val", "test"), [(0.1, 0.2), (0.25, 0.25), (0.0, 0.5), (0.0, 0.0)])
def test_fractions_are_rounded_half_up(val, test):
    clients = split_clients(
        number_samples(107), num_clients=8, val_fraction=val, test_fraction=test
    )
    for k in range(8):
        parts = [len(clients.part(part).samples(k)) for part in PARTS]
        size = sum(parts)
        assert size in (13, 14)
        assert parts[1] == math.floor(size * val + 0.5)
        assert parts[2] == math.floor(size * test + 0.5)


def test_half_a_sample_is_rounded_up():
    clients = split_clients(
        number_samples(10), num_clients=1, val_fraction=0.25, test_fraction=0.05
    )
    assert [len(all_ids(clients, part)) for part in PARTS] == [6, 3, 1]


def test_parts_are_drawn_at_random():
    clients = split_clients(number_samples(1000), num_clients=1, test_fraction=0.5)
    assert abs(sum(all_ids(clients, "test")) / 500 - 499.5) < 60
    assert ids(clients, "train")[0] != sorted(ids(clients, "train")[0])


@pytest.mark.parametrize("split", ["own", "official"])
def test_seed_determines_all_parts(split):
    def parts(seed):
        official_split = torch.tensor([0, 0, 2]).repeat(40)
        data = number_samples(120, split=official_split)
        clients = split_clients(data, num_clients=4, split=split, seed=seed)
        return [ids(clients, part) for part in PARTS]

    assert parts(1) == parts(1)
    assert parts(1) != parts(2)


def test_parts_of_a_small_federation_are_stable():
    """Seeds are stable: these numbers are those of the first release."""
    dataset = number_samples(12, classes=1, client=torch.arange(12) % 2)
    clients = split_clients(dataset, val_fraction=0.2, test_fraction=0.3)
    assert clients.train.index.tolist() == [0, 4, 10, 11, 5, 1]
    assert clients.val.index.tolist() == [2, 9]
    assert clients.test.index.tolist() == [6, 8, 3, 7]


@pytest.fixture
def split_as_many_clients(monkeypatch):
    monkeypatch.setattr("pl_fed.data.client_split._MANY_CLIENTS", 1)


@pytest.mark.usefixtures("split_as_many_clients")
@pytest.mark.parametrize("split", ["own", "official"])
@pytest.mark.parametrize("partitioned", [True, False])
def test_many_clients_have_the_same_samples_in_another_order(monkeypatch, split, partitioned):
    draw = torch.Generator().manual_seed(0)
    owner, part = (torch.randint(n, (300,), generator=draw) for n in (9, 2))
    dataset = number_samples(300, client=owner, split=part * 2)
    arguments = (IID(), 9) if partitioned else ()
    actual = split_clients(dataset, *arguments, split=split)
    other = split_clients(dataset, *arguments, split=split, seed=1)
    monkeypatch.undo()
    expected = split_clients(dataset, *arguments, split=split)
    for name in PARTS:
        assert torch.equal(actual.part(name).sizes, expected.part(name).sizes)
    everything = [
        sorted(chain(*samples)) for samples in zip(*(ids(actual, part) for part in PARTS))
    ]
    assert everything == [
        sorted(chain(*samples)) for samples in zip(*(ids(expected, part) for part in PARTS))
    ]
    assert ids(actual, "train") != ids(expected, "train")
    assert ids(actual, "train") != ids(other, "train")


@pytest.mark.usefixtures("split_as_many_clients")
def test_many_clients_have_every_order_equally_often():
    dataset = number_samples(3 * 4000, client=torch.arange(3 * 4000) // 3)
    clients = split_clients(dataset, val_fraction=0.0, test_fraction=0.0)
    orders = clients.train.index.view(4000, 3) % 3
    counts = (orders * torch.tensor([9, 3, 1])).sum(1).unique(return_counts=True)[1]
    assert len(counts) == 6
    assert scipy.stats.chisquare(counts.numpy()).pvalue > 0.01


def test_seed_draws_the_partition_and_the_parts():
    def owned_samples(seed):
        clients = split_clients(number_samples(60), num_clients=3, seed=seed)
        return [sorted(chain(*parts)) for parts in zip(*(ids(clients, p) for p in PARTS))]

    def test_samples(seed):
        client = torch.zeros(60, dtype=torch.int64)
        return ids(split_clients(number_samples(60, client=client), seed=seed), "test")

    assert owned_samples(1) != owned_samples(2)
    assert test_samples(1) != test_samples(2)


def test_default_seed_is_that_of_lightning(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    assert make_module(number_samples(9), num_clients=2, seed=None).seed == 5
    assert make_module(number_samples(9), num_clients=2, seed=6).seed == 6
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert make_module(number_samples(9), num_clients=2, seed=None).seed == 0


def test_drawing_does_not_touch_the_global_generator():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    transforms = [v2.RandomHorizontalFlip()]
    with pytest.warns(UserWarning, match="RandomHorizontalFlip of `data.transforms` draws at rand"):
        split_clients(Digits(), Shards(2), 5, transforms=transforms)
    assert torch.equal(torch.rand(2), expected)


# Official parts


def official_split(train=60, val=0, test=30):
    return torch.tensor([0] * train + [1] * val + [2] * test)


def test_official_parts_stay_apart():
    clients = split_clients(
        number_samples(90, split=official_split()), num_clients=5, split="official"
    )
    assert all_ids(clients, "test") == list(range(60, 90))
    assert all_ids(clients, "train", "val") == list(range(60))
    sizes = clients.part("val").sizes
    assert sizes.tolist() == [math.floor(12 * 0.1 + 0.5)] * 5


def test_official_val_part_is_used():
    data = number_samples(90, split=official_split(50, 10, 30))
    clients = split_clients(data, num_clients=5, split="official", val_fraction=0.5)
    assert all_ids(clients, "train") == list(range(50))
    assert all_ids(clients, "val") == list(range(50, 60))
    assert all_ids(clients, "test") == list(range(60, 90))


def test_official_test_samples_match_the_classes_of_the_client():
    data = number_samples(900, classes=6, split=official_split(600, 60, 240))
    clients = split_clients(data, Shards(2), 9, split="official")
    for k in range(9):
        trained = set(clients.targets[clients.train.samples(k)].tolist())
        assert len(trained) == 2
        for part in ("val", "test"):
            assert set(clients.targets[clients.part(part).samples(k)].tolist()) == trained


def test_official_split_is_the_default_and_is_reported_once(caplog):
    """Training never sees test samples."""
    caplog.set_level("INFO")
    data = make_module(number_samples(90, split=official_split(50, 10, 30)), num_clients=5)
    _ = data.clients
    data.setup()
    assert all_ids(data.clients, "train") == list(range(50))
    assert all_ids(data.clients, "val") == list(range(50, 60))
    assert all_ids(data.clients, "test") == list(range(60, 90))
    (messages,) = [text for text in caplog.messages if "official" in text]
    assert messages == (
        "pl_fed uses the official split of Made (50 train, 10 val and 30 test samples) and ignores"
        " `test_fraction`: set `data.split: own` to pool all samples and cut each client's."
    )


def test_official_split_is_pooled_with_split_own(caplog):
    caplog.set_level("INFO")
    clients = split_clients(number_samples(90, split=official_split()), num_clients=5, split="own")
    assert set(all_ids(clients, "train")) & set(range(60, 90))
    assert not caplog.messages


def test_validation_part_stays_where_a_test_part_lacks():
    data = make_module(number_samples(90, split=official_split(60, 30, 0)), num_clients=5)
    words = "uses the official split of Made .60 train, 30 val and 0 test samples., keeps its val"
    with pytest.warns(UserWarning, match=words):
        clients = data.clients
    assert sorted(all_ids(clients, "val")) == [*range(60, 90)]
    assert sorted(all_ids(clients, "train") + all_ids(clients, "test")) == [*range(60)]
    assert clients.test.sizes.tolist() == [2] * 5, "a fifth of each client's twelve"
    assert clients.official == ("train", "val")


def test_test_part_stays_where_a_validation_part_lacks():
    clients = split_clients(number_samples(90, split=official_split(60, 0, 30)), num_clients=5)
    assert sorted(all_ids(clients, "test")) == [*range(60, 90)]
    assert sorted(all_ids(clients, "train") + all_ids(clients, "val")) == [*range(60)]
    assert clients.official == ("train", "test")


def test_a_single_training_part_is_cut_like_data_without_parts():
    one, none = (
        split_clients(number_samples(90, split=split), num_clients=5)
        for split in (official_split(90, 0, 0), None)
    )
    for part in ("train", "val", "test"):
        assert all_ids(one, part) == all_ids(none, part)
    assert one.official == ()


@table_test("parts", [(0, 30, 60), (0, 0, 90), (0, 90, 0)])
def test_parts_without_training_samples_are_refused(parts):
    data = number_samples(90, split=official_split(*parts))
    with pytest.raises(ValueError, match=r"^Expected .* training part but got Made .*split: own"):
        split_clients(data, num_clients=5)
    assert split_clients(data, num_clients=5, split="own").train.sizes.sum() == 60


def test_data_without_an_official_split_is_not_reported(caplog):
    caplog.set_level("INFO")
    split_clients(number_samples(90), num_clients=5)
    assert not caplog.messages


def test_a_partitioner_that_needs_official_parts_refuses_data_without_any():
    with pytest.raises(ValueError, match="official parts for `split: official` but got Made"):
        split_clients(number_samples(90), Shards(2, whole_test_classes=True), 5)


@table_test(
    ("parts", "words"),
    [
        (None, "official parts for `split: official` but got Made without any"),
        (official_split(90, 0, 0), "90 training and 0 test samples"),
        (official_split(0, 0, 90), "0 training and 90 test samples"),
    ],
)
def test_missing_official_parts_are_refused(parts, words):
    with pytest.raises(ValueError, match=words):
        split_clients(number_samples(90, split=parts), num_clients=3, split="official")


# Clients that the data set itself names


def test_any_ids_become_clients_in_ascending_order():
    client = torch.tensor([70, -3, 70, 12, -3, 70])
    clients = split_clients(number_samples(6, client=client), val_fraction=0.0, test_fraction=0.0)
    assert [sorted(samples) for samples in ids(clients, "train")] == [[1, 4], [3], [0, 2, 5]]


def test_ids_with_official_parts():
    client = torch.tensor([5, 9, 5, 9, 5, 9, 5, 9])
    split = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2])
    clients = split_clients(number_samples(8, client=client, split=split), split="official")
    assert [sorted(samples) for samples in ids(clients, "train")] == [[0, 2], [1, 3]]
    assert ids(clients, "val") == [[4], []]
    assert [sorted(samples) for samples in ids(clients, "test")] == [[6], [5, 7]]


def test_id_without_training_samples_is_refused():
    client, split = torch.tensor([4, 4, 17, 4]), torch.tensor([0, 0, 2, 2])
    with pytest.raises(ValueError, match=r"1 of 2 clients, .* client 1 \(id 17 in the data\)"):
        split_clients(number_samples(4, client=client, split=split), split="official")


def test_a_partitioner_overrides_the_ids():
    client = torch.tensor([1, 1, 1, 1, 1, 1])
    clients = split_clients(
        number_samples(6, client=client), IID(), 3, val_fraction=0, test_fraction=0
    )
    assert clients.train.sizes.tolist() == [2, 2, 2]


def test_num_clients_must_equal_the_number_of_ids():
    data = number_samples(4, client=torch.tensor([1, 1, 2, 2]))
    assert FederatedData(data, num_clients=2).clients.num_clients == 2
    with pytest.raises(ValueError, match=r"`num_clients` to be 2, .* but got 3"):
        _ = FederatedData(data, num_clients=3).clients


# What cannot be shared out


@table_test(
    ("arguments", "words"),
    [
        ({"num_clients": 31}, r"`num_clients` .* number of samples \(30\) but got 31"),
        ({"num_clients": 0, "partitioner": IID()}, "`num_clients` to be at least 1 but got 0"),
        ({"num_clients": 30, "val_fraction": 0.5}, "none for 30 of 30 clients.* client 0:"),
        ({"num_clients": 5, "partitioner": Shards(3)}, r"number of classes \(2\) but got 3"),
        ({"num_clients": None}, "as Made records no owners"),
    ],
)
def test_impossible_numbers_of_clients_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        split_clients(number_samples(30), **arguments)


@table_test(
    ("arguments", "words"),
    [
        ({"batch_size": 0}, "`batch_size` to be at least 1 but got 0"),
        ({"clients_per_eval_batch": 0}, "`clients_per_eval_batch` to be at least 1"),
        ({"val_fraction": 1.0}, r"`val_fraction` to be in \[0, 1\) but got 1.0"),
        ({"test_fraction": -0.1}, r"`test_fraction` to be in \[0, 1\) but got -0.1"),
        ({"test_fraction": math.nan}, r"`test_fraction` to be in \[0, 1\) but got nan"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "below 1 but got 1.0: no training"),
        ({"num_clients": None}, "`num_clients` to be set with a partitioner but got None"),
        ({"split": "offical"}, "`split` to be 'own' or 'official' but got 'offical'"),
        (
            {"partitioner": Shards(2, whole_test_classes=True), "split": "own"},
            "`split` to be official with `whole_test_classes` of Shards but got own: there is no",
        ),
        ({"normalize": "chanel"}, "`normalize` to be 'none', .* but got 'chanel'"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        FederatedData(number_samples(30), **{"partitioner": IID(), "num_clients": 3, **arguments})


# The server's own samples


class Overlapping(IID):
    """Give every sample to two clients."""

    def split(self, labels, num_clients, generator):
        pieces = super().split(labels, num_clients, generator)
        return [torch.cat([a, b]) for a, b in zip(pieces, pieces[1:] + pieces[:1])]


@pytest.mark.parametrize("partitioner", [IID(), Shards(2), Overlapping()])
@pytest.mark.parametrize("split", ["own", "official"])
@pytest.mark.parametrize("number", [1, 17])
def test_root_samples_belong_to_no_client(partitioner, split, number):
    """They come from training samples, and no other sample moves."""
    data = number_samples(120, split=torch.tensor([0, 0, 0, 2]).repeat(30))
    expected = split_clients(data, partitioner, 4, split=split)
    clients = split_clients(data, partitioner, 4, split=split, root_samples=number)
    root = clients.root.tolist()
    assert len(set(root)) == len(root) == number
    assert set(root) <= set(all_ids(expected, "train"))
    assert not set(root) & set(all_ids(clients, "train"))
    for k in range(4):
        remaining = [sample for sample in ids(expected, "train")[k] if sample not in root]
        assert clients.train.samples(k).tolist() == remaining
        assert int(clients.train.sizes[k]) == len(remaining)
    for part in ("val", "test"):
        assert ids(clients, part) == ids(expected, part)


def test_server_has_no_samples_by_default():
    clients = split_clients(number_samples(30), num_clients=3)
    assert clients.root.tolist() == []
    assert clients.root.dtype == torch.int64


def test_root_samples_are_drawn_at_random_by_the_seed():
    def root(**settings):
        return split_clients(number_samples(1000), num_clients=5, **settings).root.tolist()

    drawn = root(root_samples=200, seed=3)
    assert drawn == root(root_samples=200, seed=3)
    assert drawn[:50] == root(root_samples=50, seed=3)
    assert drawn != root(root_samples=200, seed=4)
    assert drawn != sorted(drawn)
    assert abs(sum(drawn) / 200 - 499.5) < 80


def test_root_samples_move_with_the_data():
    clients = split_clients(number_samples(30), num_clients=3, root_samples=5)
    moved = clients.to(torch.device("cpu"), torch.float64)
    assert torch.equal(moved.root, clients.root)


def test_root_inputs_are_normalized_by_training_samples():
    dataset = number_samples(40)
    clients = split_clients(dataset, num_clients=2, root_samples=10, normalize="channel")
    samples = torch.tensor(all_ids(clients, "train"), dtype=torch.float32)
    assert clients.inputs[5, 0].item() == pytest.approx(
        (5 - samples.mean().item()) / samples.std(correction=0).item(), rel=1e-5
    )


@table_test(
    ("number", "error", "words"),
    [
        (-1, ValueError, "`root_samples` to be at least 0 but got -1"),
        (1.5, TypeError, "`root_samples` to be an integer but got 1.5"),
        (
            21,
            ValueError,
            "`root_samples` to be below the 21 training samples of all clients but got",
        ),
        (
            99,
            ValueError,
            "`root_samples` to be below the 21 training samples of all clients but got",
        ),
        (20, ValueError, "none for 2 of 3 clients, .* or fewer `root_samples`"),
    ],
)
def test_invalid_numbers_of_root_samples_are_refused(number, error, words):
    with pytest.raises(error, match=f"^Expected .*{words}"):
        split_clients(number_samples(30), num_clients=3, root_samples=number)


# Inputs


def test_only_uint8_inputs_are_scaled():
    x = torch.tensor([[0], [51], [255]], dtype=torch.uint8)
    y = torch.tensor([0, 1, 0])
    scaled = split_clients(Made(x, y, num_classes=2), num_clients=1).inputs
    assert scaled.flatten().tolist() == [0.0, pytest.approx(0.2), 1.0]
    assert x.flatten().tolist() == [0, 51, 255], "the source's own tensor stays as it is"
    for dtype in (torch.int64, torch.float64, torch.float16, torch.int16):
        source = Made(x.to(dtype), y, num_classes=2)
        taken = split_clients(source, num_clients=1).inputs
        assert taken.dtype == (torch.float32 if dtype == torch.float16 else dtype)
        assert taken.flatten().tolist() == [0.0, 51.0, 255.0]
        changed = split_clients(source, num_clients=1, normalize="channel").inputs
        real = torch.float64 if dtype == torch.float64 else torch.float32
        assert changed.dtype == real, "what is changed becomes real numbers"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_class_ids_become_int64(dtype):
    y = torch.tensor([0, 1, 2], dtype=dtype)
    clients = split_clients(Made(torch.zeros(3, 1), y, num_classes=3), num_clients=1)
    assert clients.targets.dtype == torch.int64
    assert clients.num_classes == 3


def test_features_with_a_graph_are_samples_without_one():
    weight = torch.ones(1, requires_grad=True)
    x, y = weight * torch.ones(4, 2), weight * torch.ones(4, 1)
    arrays = Arrays((x, x), {"a": y})
    assert not any(leaf.requires_grad for leaf in (*arrays.inputs, arrays.targets["a"]))
    assert arrays.inputs[0].data_ptr() == x.data_ptr(), "no copy"


def test_real_targets_stay_real():
    y = torch.tensor([[0.5], [1.5], [2.5]])
    clients = split_clients(Made(torch.zeros(3, 1), y), num_clients=1)
    assert torch.equal(clients.targets, y)
    assert clients.num_classes == 0


def images(*means, samples=40, size=3):
    """Images whose channels have these means."""
    noise = torch.randn(samples, len(means), size, size, generator=torch.Generator().manual_seed(0))
    x = noise * torch.tensor([1.0 + i for i in range(len(means))]).view(1, -1, 1, 1)
    return x + torch.tensor(means).view(1, -1, 1, 1)


def normalize_with_outliers(normalize, **others):
    """Training samples 0..39, and test samples 40..49 that would spoil the statistics."""
    x = torch.cat([images(2.0, -5.0), torch.full((10, 2, 3, 3), 1e6)])
    data = Made(
        x, torch.zeros(50, dtype=torch.int64), split=official_split(40, 0, 10), num_classes=1
    )
    clients = split_clients(
        data, IID(), 2, split="official", val_fraction=0.0, normalize=normalize, **others
    )
    return x, clients.inputs


def test_normalize_channel_by_training_samples_only():
    x, normalized = normalize_with_outliers("channel")
    train = normalized[:40].double()
    assert train.mean((0, 2, 3)).abs().max() < 1e-6
    assert (train.var((0, 2, 3), correction=0) - 1).abs().max() < 1e-5
    mean, std = x[:40, 1].double().mean(), x[:40, 1].double().std(correction=0)
    expected = (x[:, 1].double() - mean) / std
    assert torch.allclose(normalized[:, 1].double(), expected, rtol=1e-5, atol=1e-5)


def test_normalize_feature_by_training_samples_only():
    x, normalized = normalize_with_outliers("feature")
    mean, std = x[:40].double().mean(0), x[:40].double().std(0, correction=0)
    assert torch.allclose(
        normalized.double(), (x.double() - mean) / (std + 0.001), rtol=1e-5, atol=1e-5
    )


def test_normalization_excludes_the_val_part():
    data = number_samples(10)
    clients = split_clients(
        data, num_clients=1, val_fraction=0.4, test_fraction=0.0, normalize="channel"
    )
    train = torch.tensor(all_ids(clients, "train"), dtype=torch.float64)
    expected = (torch.arange(10) - train.mean()) / train.std(correction=0)
    assert torch.allclose(clients.inputs.flatten().double(), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("pair", "mean", "std"),
    [
        ([2.0, 4.0], [2.0, 2.0], [4.0, 4.0]),
        ([[2.0, -5.0], [4.0, 8.0]], [2.0, -5.0], [4.0, 8.0]),
        ([[2.0, -5.0], [4.0]], [2.0, -5.0], [4.0, 4.0]),
    ],
)
def test_normalize_by_a_pair(pair, mean, std):
    x, normalized = normalize_with_outliers(pair)
    for channel in range(2):
        expected = (x[:, channel] - mean[channel]) / std[channel]
        assert torch.equal(normalized[:, channel], expected)


@pytest.mark.parametrize(
    "type", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool]
)
def test_ids_may_have_any_integer_type(type):
    ids = (torch.arange(20) % 2).to(type)
    source = Made(torch.rand(20, 2), ids, client=ids, num_classes=2)
    assert count_classes(ids) == 2
    for settings in ({}, {"partitioner": Shards(1), "num_clients": 2}):
        clients = split_clients(source, **settings)
        assert clients.targets.tolist() == ids.to(torch.int64).tolist()
        assert clients.num_clients == 2
    with pytest.raises(ValueError, match=r"`client` to be integers below 2\^63 but got larger"):
        replace(source.load(), client=torch.full((20,), -1).to(torch.uint64))


def test_large_val_fraction_with_an_official_test_part():
    """The fraction of an official test part is ignored."""
    source = number_samples(40, split=torch.arange(40) % 2 * 2)
    settings = {"split": "official", "val_fraction": 0.9, "test_fraction": 0.2}
    clients = split_clients(source, IID(), 1, **settings)
    assert [int(clients.part(part).sizes) for part in ("train", "val", "test")] == [2, 18, 20]


def test_normalize_none():
    x, normalized = normalize_with_outliers("none")
    assert torch.equal(normalized, x)


@table_test(
    "pair",
    [
        *([1.0], [0.0, 0.0], [0.0, -1.0], [[0.0, 0.0, 0.0], [1.0]], [[], []]),
        *([math.nan, 1.0], [0.0, math.nan], [0.0, math.inf]),
    ],
)
def test_invalid_normalization_pair_is_refused(pair):
    with pytest.raises(ValueError, match=r"`normalize` to (be a pair|hold one finite number)"):
        normalize_with_outliers(pair)


def test_constant_channel_is_normalized_to_finite_numbers():
    x = torch.full((20, 2), 0.1)
    x[:, 1] = torch.arange(20)
    x[15:, 0] = 0.2  # not constant in the test part
    data = Made(
        x, torch.zeros(20, dtype=torch.int64), split=official_split(15, 0, 5), num_classes=1
    )
    clients = split_clients(data, IID(), 1, split="official", val_fraction=0.0, normalize="channel")
    assert clients.inputs[:15, 0].abs().max() < 1e-6
    assert torch.allclose(clients.inputs[15:, 0], torch.tensor(0.1), atol=1e-6)


@pytest.mark.parametrize("normalize", ["channel", "feature", [1.0, 2.0]])
def test_inputs_of_one_number_per_sample(normalize):
    data = Made(torch.tensor([1.0, 3.0]), torch.tensor([0, 1]), num_classes=2)
    clients = split_clients(
        data, num_clients=1, val_fraction=0, test_fraction=0, normalize=normalize
    )
    assert clients.inputs.shape == (2,)


@pytest.mark.parametrize(("partitioner", "is_reported"), [(IID(), True), (ByOwner(), False)])
def test_owners_that_a_partitioner_does_not_regard_are_reported(partitioner, is_reported, caplog):
    owners = torch.arange(12) % 4
    data = Made(torch.zeros(12, 1), torch.zeros(12), client=owners)
    _ = FederatedData(data, partitioner, 2).clients
    assert is_reported == (
        "IID splits the samples of Made without regard to their 4" in caplog.text
    )


# Transforms


def test_transforms_are_batched_and_precede_normalization():
    inputs_seen = []

    class Look(nn.Module):
        def forward(self, x):
            inputs_seen.append((x.shape, float(x.min()), float(x.max())))
            return x

    x = torch.randint(256, (20, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator())
    data = Made(x, torch.zeros(20, dtype=torch.int64), num_classes=1)
    transforms = [Look(), v2.Resize(4, antialias=True), v2.Grayscale()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # these transforms do not draw
        clients = split_clients(data, num_clients=2, transforms=transforms, normalize="channel")
    assert inputs_seen == [(x.shape, 0.0, 1.0)]
    assert clients.inputs.shape == (20, 1, 4, 4)
    train = clients.inputs[torch.tensor(all_ids(clients, "train"))]
    assert abs(float(train.mean())) < 1e-5


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_transforms_in_place_leave_the_samples_of_the_source(dtype):
    """A second federation with the same source transformed the samples a second time."""
    x = torch.tensor([[0.0, 255.0], [255.0, 0.0]]).to(dtype).view(2, 1, 1, 2)
    source = Made(x if dtype == torch.uint8 else x / 255, torch.zeros(2).long(), num_classes=1)
    for _ in range(2):
        transforms = [v2.Normalize([0.5], [0.5], inplace=True)]
        inputs = split_clients(source, num_clients=1, transforms=transforms).inputs
        assert inputs.flatten().tolist() == [-1.0, 1.0, 1.0, -1.0]


def test_random_transforms_are_keyed_by_the_seed():
    def inputs(seed):
        transforms = [v2.RandomCrop(6), v2.RandomRotation(90)]
        return split_clients(Digits(), num_clients=2, transforms=transforms, seed=seed).inputs

    assert torch.equal(inputs(0), inputs(0))
    assert not torch.equal(inputs(0), inputs(1))


def test_transform_that_drops_samples_is_refused():
    class Half(nn.Module):
        def forward(self, x):
            return x[::2]

    with pytest.raises(ValueError, match=r"number of samples \(1797\) but got 899 from Half"):
        split_clients(Digits(), num_clients=2, transforms=[Half()])


def test_augment_changes_only_training_batches():
    module = make_module(Digits(), num_clients=2, augment=[v2.RandomHorizontalFlip(p=1.0)])
    data = module.clients
    assert torch.equal(data.inputs, Digits().load().inputs)
    rule = BatchRule(batch_size=8, shuffle=False)
    batches = Batches(data, torch.tensor([1]), [1], rule, 0, 0, augment=module.augment)
    (batch,) = batches.iterate_client(0)
    samples = data.train.samples(1)[:8]
    assert torch.equal(batch.inputs, data.inputs[samples].flip(-1))


def test_augment_is_none_by_default():
    assert make_module(Digits(), num_clients=2).augment is None


# What Lightning takes for loaders


def test_loaders_yield_client_ids():
    module = make_module(Digits(), num_clients=7, clients_per_eval_batch=3)
    assert [batch.tolist() for batch in module.val_dataloader()] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [batch.tolist() for batch in module.test_dataloader()] == [[0, 1, 2], [3, 4, 5], [6]]
    assert len(module.train_dataloader()) == 7


@pytest.mark.parametrize(
    ("num_clients", "size"), [(7, 32), (3200, 32), (3201, 33), (100_000, 1000), (10**6, 4096)]
)
def test_default_evaluation_batch_grows_with_the_clients(num_clients, size):
    module = make_module(Digits(), num_clients=7)
    module._clients = SimpleNamespace(num_clients=num_clients)
    assert module.val_dataloader().size == size


@pytest.mark.parametrize(("wanted", "expected"), [(None, [0, 1, 2]), ([2, 0], [2, 0]), ([], [])])
def test_predict_clients(wanted, expected):
    module = make_module(Digits(), num_clients=3, predict_clients=wanted)
    module.setup("predict")
    assert [k for batch in module.predict_dataloader() for k in batch.tolist()] == expected


@table_test("wanted", [[3], [-1], [0, 7]])
def test_unknown_predict_clients_are_refused(wanted):
    module = make_module(Digits(), num_clients=3, predict_clients=wanted)
    with pytest.raises(ValueError, match="`predict_clients` to be ids from 0 to 2 but got"):
        module.setup("predict")


def test_zero_clients_give_no_batch():
    assert list(ClientBatches([], 4)) == []
    assert len(ClientBatches([], 4)) == 0


def test_data_are_loaded_once_on_first_access():
    class Counted(Digits):
        loads = 0

        def load(self):
            Counted.loads += 1
            return super().load()

    module = make_module(Counted(), num_clients=3)
    assert Counted.loads == 0
    module.setup("fit")
    module.setup("test")
    assert module.clients is module.clients
    assert Counted.loads == 1


# Arrays that do not fit together, from whatever source

GOOD = {"inputs": torch.zeros(4, 2), "targets": torch.tensor([0, 1, 1, 0]), "num_classes": 2}


@table_test(
    ("broken", "words"),
    [
        (
            {"inputs": torch.zeros(0, 2)},
            r"`inputs` to hold at least one sample but got shape \[0, 2\]",
        ),
        ({"inputs": torch.tensor(1.0)}, r"`inputs` to hold at least one sample but got shape \[\]"),
        (
            {"targets": torch.zeros(3, dtype=torch.int64)},
            r"`targets` to have 4 rows, .* shape \[3\]",
        ),
        ({"client": torch.zeros(5, dtype=torch.int64)}, r"`client` to have 4 rows"),
        ({"split": torch.zeros(5, dtype=torch.int64)}, r"`split` to have 4 rows"),
        ({"split": torch.tensor([0, 1, 2, 3])}, r"`split` to be 0 \(train\), .* but got 3"),
        ({"split": torch.zeros(4)}, "`split` to be integers but got torch.float32"),
        ({"client": torch.zeros(4)}, "`client` to be integers but got torch.float32"),
        ({"client": torch.zeros(4, 1, dtype=torch.int64)}, r"of shape \[samples\] .* \[4, 1\]"),
        ({"targets": torch.tensor([0, 1, 2, 0])}, r"below `num_classes` \(2\) but got 2"),
        ({"targets": torch.tensor([0, -1, 1, 0])}, r"class ids from 0 .* but got -1"),
        (
            {"targets": torch.zeros(4, 1, dtype=torch.int64)},
            r"of shape \[samples\] but got \[4, 1\]",
        ),
        ({"num_classes": 0}, "`num_classes` to be the largest class id plus 1 .* got 0"),
        ({"targets": torch.zeros(4)}, r"`num_classes` to be left out .* but got 2"),
        (
            {"inputs": torch.tensor([[0, 1], [0, math.nan], [0, 1], [math.inf, 1]])},
            "2 samples, .* 1",
        ),
        (
            {"targets": torch.tensor([0.0, 1.0, math.inf, 1.0]), "num_classes": 0},
            "`targets` .* sample 2",
        ),
    ],
)
def test_mismatched_arrays_are_refused(broken, words):
    with pytest.raises(ValueError, match=words):
        Arrays(**{**GOOD, **broken})


@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        (Arrays(torch.zeros(90, 3), torch.zeros(90)), "whose `load` returns them"),
        (torch.zeros(90, 3), r"TorchDataset\(torch.utils.data.TensorDataset\(inputs, targets\)\)"),
        (torch.zeros(3).numpy(), r"TorchDataset\(torch.utils.data.TensorDataset"),
        ([(torch.zeros(3), 1)], r"TorchDataset\(torch.utils.data.TensorDataset"),
        (pandas.DataFrame({"x": [1.0]}), r"pass pl_fed.data.Table\(path\)"),
    ],
    ids=["Arrays", "tensor", "array", "list", "frame"],
)
def test_data_without_a_source_are_refused_with_the_source_that_takes_them(data, remedy):
    kind = type(data).__name__
    with pytest.raises(TypeError, match=f"`dataset` .* but got {kind}: .*{remedy}") as refused:
        FederatedData(data)
    assert "\n" not in str(refused.value)


def test_other_objects_are_refused_by_their_type_alone():
    long = SimpleNamespace(values=list(range(1000)))
    with pytest.raises(TypeError, match=r"but got an object of type SimpleNamespace\.$"):
        FederatedData(long)
