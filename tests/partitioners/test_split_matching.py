"""Splitting an official test set, with numbers that can be checked by hand."""

import torch

from pl_fed.partitioners import Partitioner


class InOrder(Partitioner):
    """The first six samples to client 0, the rest to client 1."""

    def split(self, labels, num_clients, generator):
        return [torch.arange(6), torch.arange(6, len(labels))]


def class_counts(labels, test_labels):
    _, test = InOrder().split_matching(labels, test_labels, 2, torch.Generator())
    return [test_labels[part].bincount(minlength=3).tolist() for part in test]


def test_test_samples_are_divided_in_proportion_to_the_training_samples():
    # Client 0 trains on 4 of the 8 samples of class 0 and on 2 of the 3 of class 1.
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1])
    test_labels = torch.tensor([1, 0] * 6)
    assert class_counts(labels, test_labels) == [[3, 4, 0], [3, 2, 0]]


def test_test_samples_of_a_class_go_to_its_only_training_client():
    labels = torch.tensor([0] * 6 + [1] * 6)
    assert class_counts(labels, torch.tensor([0, 1] * 5)) == [[5, 0, 0], [0, 5, 0]]


def test_test_samples_of_an_untrained_class_are_divided_equally():
    labels = torch.tensor([0] * 6 + [1] * 6)
    assert class_counts(labels, torch.tensor([2] * 30)) == [[0, 0, 15], [0, 0, 15]]
