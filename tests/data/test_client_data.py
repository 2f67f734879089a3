"""Clients' samples as tables."""

import warnings

import numpy as np
import pytest
import torch
from small_federations import Given, classes, shared_out
from tables import table_test

from pl_fed.data import Arrays, FederatedData
from pl_fed.partitioners import Partitioner
from pl_fed.skews import Rotations


class AllHaveAll(Partitioner):
    """Everybody has all samples."""

    def split(self, labels, num_clients, generator):
        return [torch.arange(len(labels))] * num_clients


def test_copies_have_the_ids_of_their_samples():
    arrays = classes([12], (1, 4, 4))
    data = FederatedData(Given(arrays), AllHaveAll(), 4, skew=Rotations(), root_samples=2).clients
    assert len(data.ids) == len(data.inputs) > len(arrays.inputs)
    assert torch.equal(data.targets, arrays.targets[data.ids])
    for client in range(4):
        index = torch.cat([data.part(name).samples(client) for name in ("train", "val", "test")])
        turned = arrays.inputs[data.ids[index]].rot90(client, (2, 3))
        torch.testing.assert_close(data.inputs[index], turned)


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_samples_of_some_clients_are_padded_to_the_largest_of_all(part):
    data = shared_out(classes([30, 24, 4, 40]), val_fraction=0.25, test_fraction=0.25).clients
    clients = torch.tensor([3, 0, 2])
    x, y = data.pad_part(part, clients)
    largest = int(data.part(part).sizes.max())
    assert x.shape == (3, largest, 4)
    assert y.shape == (3, largest)
    for position, client in enumerate(clients.tolist()):
        index = data.part(part).samples(client)
        assert torch.equal(x[position, : len(index)], data.inputs[index])
        assert torch.equal(y[position, : len(index)], data.targets[index])


def test_padded_table_of_an_empty_part_is_empty():
    data = shared_out(classes([3, 4])).clients
    x, y = data.pad_part("val", torch.tensor([1, 0]))
    assert x.shape == (2, 0, 4)
    assert y.shape == (2, 0)


@table_test(
    ("arguments", "words"),
    [
        (
            (np.zeros((2, 3)), torch.zeros(2)),
            "`inputs` to be a tensor but got ndarray: convert an array by",
        ),
        (
            (torch.zeros(2, 3), [0, 1]),
            "`targets` to be a tensor but got int",
        ),
        ((torch.zeros(2, 3), torch.zeros(2), [0, 1]), "`client` to be a tensor but got list"),
    ],
)
def test_arrays_that_are_no_tensors_are_refused(arguments, words):
    with pytest.raises(TypeError, match=f"^Expected {words}"):
        Arrays(*arguments)


def test_class_ids_need_num_classes():
    with pytest.raises(ValueError, match="`num_classes` to be the largest class id plus 1"):
        Arrays(torch.zeros(2, 3), torch.tensor([0, 1]))


class Everything(Partitioner):
    """All samples for all clients."""

    def split(self, labels, num_clients, generator):
        return [torch.arange(len(labels))] * num_clients


@pytest.mark.parametrize("meant", [False, True])
def test_samples_of_several_clients_are_reported_unless_overlapping(meant):
    partitioner = Everything()
    partitioner.overlapping = meant
    data = FederatedData(Given(classes([30])), partitioner, num_clients=3, seed=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        index = data.clients.train.index
    messages = [
        str(warning.message) for warning in caught if "to several clients" in str(warning.message)
    ]
    assert len(messages) == (0 if meant else 1)
    assert len(index.unique()) < len(index)
