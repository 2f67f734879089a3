"""Held-out clients in the data: who they are, and what they do not change."""

import unicodedata

import pytest
import torch
from small_federations import Given, classes, shared_out
from torch import nn

from pl_fed.data import FederatedData
from pl_fed.data.held_out import mark_held_out
from pl_fed.data.shared_quantities import describe_shared_quantity
from pl_fed.data.source import Arrays
from pl_fed.exports.request import find_client
from pl_fed.partitioners import IID
from pl_fed.skews.base import Skew

SIZES = [12, 9, 15, 11, 14]
NAMES = ["ann", "bob", "cy", "dan", "eve"]


def named(sizes=SIZES):
    arrays = classes(sizes)
    return Arrays(
        arrays.inputs, arrays.targets, arrays.client, num_classes=3, names=NAMES[: len(sizes)]
    )


def owners(data):
    return [own for (own,) in data.owners]


@pytest.mark.parametrize(("held_out", "number"), [(0.4, 2), (0.01, 1), (3, 3), (0.5, 3)])
def test_share_and_number_draw_clients_by_the_seed(held_out, number):
    first = mark_held_out(held_out, 5, (), seed=0)
    assert int(first.sum()) == number
    assert torch.equal(first, mark_held_out(held_out, 5, (), seed=0))
    draws = {tuple(mark_held_out(held_out, 5, (), seed).tolist()) for seed in range(40)}
    assert len(draws) > 3
    assert (mark_held_out(1, 5, (), seed=0) <= first).all(), "a part of the larger draw"


def test_held_out_clients_keep_their_samples_and_names():
    whole = shared_out(named(), val_fraction=0.3, test_fraction=0.3)
    held = shared_out(named(), val_fraction=0.3, test_fraction=0.3, held_out_clients=["dan", "bob"])
    assert owners(held.clients) == ["ann", "cy", "eve"]
    assert owners(held.held_out) == ["bob", "dan"]
    assert held.num_evaluated == 5
    assert whole.held_out is None
    assert whole.num_evaluated == 5
    for data, ids in ((held.clients, (0, 2, 4)), (held.held_out, (1, 3))):
        for part in ("train", "val", "test"):
            for position, client in enumerate(ids):
                expected = whole.clients.part(part).samples(client)
                assert torch.equal(data.part(part).samples(position), expected)
    assert held.held_out.inputs is held.clients.inputs, "no sample is copied"
    assert [len(batch) for batch in held.train_dataloader()] == [1, 1, 1]
    assert torch.cat(list(held.test_dataloader())).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("mode", ["channel", "feature"])
def test_normalization_is_that_of_training_clients(mode):
    """Numbers of a held-out client, however large, change nothing of the training clients."""
    samples = []
    for factor in (1.0, 1000.0):
        arrays = named()
        arrays.inputs[12:21] *= factor
        data = shared_out(arrays, normalize=mode, held_out_clients=["bob"]).clients
        samples.append(data.inputs[data.train.index])
    assert torch.equal(*samples)
    data = shared_out(named(), normalize=mode, held_out_clients=["bob"]).clients
    assert data.inputs[data.train.index].mean(0).abs().max() < 1 if mode == "channel" else 1e-6


def test_root_samples_are_those_of_training_clients():
    held = shared_out(named(), root_samples=40, held_out_clients=["bob"])
    data = held.clients
    assert len(data.root) == 40
    assert not torch.isin(data.root, torch.arange(12, 21)).any()
    assert held.held_out.train.sizes.tolist() == [9]
    with pytest.raises(ValueError, match="below the 52 training samples of all clients that train"):
        _ = shared_out(named(), root_samples=52, held_out_clients=["bob"]).clients


class Shift(Skew):
    """Shift: adds the client's number."""

    def change(self, x, client, num_clients, seed):
        return x + client


def test_skew_is_that_of_the_whole_federation():
    whole = shared_out(named(), skew=Shift()).clients
    data = shared_out(named(), skew=Shift(), held_out_clients=["bob"])
    assert torch.equal(
        whole.inputs[12:21], data.held_out.inputs[data.held_out.train.index.sort()[0]]
    )
    assert torch.equal(whole.inputs, data.clients.inputs)


def test_identity_of_the_training_clients_does_not_know_held_out_clients():
    """A checkpoint of the training clients fits with any held-out clients' samples."""
    digests = []
    for factor in (1, 2):
        arrays = named()
        arrays.targets[12:21] = (arrays.targets[12:21] + factor) % 3
        digests.append(shared_out(arrays, held_out_clients=["bob"]).clients.digests)
    assert digests[0] == digests[1]


def test_partitioner_makes_all_clients():
    arrays = classes([60])
    data = FederatedData(
        Given(Arrays(arrays.inputs, arrays.targets, num_classes=3)), IID(), 6, held_out_clients=0.5
    )
    assert data.clients.num_clients == data.held_out.num_clients == 3
    assert not torch.isin(data.clients.train.index, data.held_out.train.index).any()


@pytest.mark.parametrize(
    ("held_out", "error", "match"),
    [
        (1.0, ValueError, "a share between 0 and 1, but got 1.0: set a share such as 0.2"),
        (0.0, ValueError, "a share between 0 and 1, but got 0.0"),
        (0, ValueError, "at least 1 client but got 0"),
        (True, TypeError, "a share such as 0.2, .* but got True"),
        ([], ValueError, "at least one owner but got an empty list"),
        (5, ValueError, "leave clients for training but got 5, which holds out all 5 clients"),
        (9, ValueError, "leave clients for training but got 9"),
        (0.99, ValueError, "leave clients for training but got 0.99"),
        (NAMES, ValueError, r"got \[ann, bob, cy, dan, eve\], which holds out all 5"),
        (["anne"], ValueError, "list owners of the data but got 'anne': .*ann"),
    ],
)
def test_senseless_settings_are_refused(held_out, error, match):
    with pytest.raises(error, match=match):
        _ = shared_out(named(), held_out_clients=held_out).clients


def test_names_have_any_form_in_unicode():
    """The refusal named the same letters as an example."""
    owners = [["Uri"], [unicodedata.normalize("NFD", "Genève")]]
    assert mark_held_out(["Genève"], 2, owners, seed=0).tolist() == [False, True]
    assert find_client("Genève", 2, owners) == 1


def test_names_need_owners():
    arrays = classes([60])
    data = FederatedData(
        Given(Arrays(arrays.inputs, arrays.targets, num_classes=3)),
        IID(),
        6,
        held_out_clients=["a"],
    )
    with pytest.raises(ValueError, match=r"no owners, but got \[a\]: set a share such as 0.2"):
        _ = data.clients


def test_privacy_refuses_statistics_as_without_held_out_clients():
    data = shared_out(named(), normalize="channel", held_out_clients=1, transforms=[nn.Identity()])
    assert "data.normalize" in describe_shared_quantity(data, "for `federation.privacy`")
