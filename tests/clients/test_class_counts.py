"""The clients' numbers of samples by class, as algorithms read them."""

from dataclasses import replace

import pytest
import torch
from exhaustive import exhaustive_for
from small_federations import classes, mlp, run_tried_rounds, seeded, sgd, shared_out

from pl_fed.attacks import RandomLabels
from pl_fed.clients import FedAvg

SIZES = [7, 3, 10, 1]


class Counted(FedAvg):
    """FedAvg with a loss that is weighted by the client's share of class 0."""

    reads_class_counts = True

    def begin(self, client):
        counts = client.class_counts
        assert counts.shape == (len(client), 3)
        assert torch.equal(counts.sum(1, keepdim=True), client.samples)
        self.seen |= dict(zip(client.ids.tolist(), counts.tolist()))

    def training_step(self, batch, batch_idx):
        counts = self.read("class_counts")
        return counts[0] / counts.sum() * self.loss("global", batch)


class ByHand(FedAvg):
    """The same with counts from a loop over the samples."""

    def __init__(self, *args, table, **kwargs):
        super().__init__(*args, **kwargs)
        self.table = table

    def training_step(self, batch, batch_idx):
        counts = self.table[int(self.read("client")[0])]
        return counts[0] / sum(counts) * self.loss("global", batch)


def count(data):
    table = [[0, 0, 0] for _ in SIZES]
    clients = data.clients
    for client, counts in enumerate(table):
        for sample in clients.train.samples(client).tolist():
            counts[int(clients.targets[sample])] += 1
    return table


@exhaustive_for("stacked")
@pytest.mark.parametrize("engine", ["one_by_one", "stacked", "stacked_compiled"])
@pytest.mark.slow
def test_counts_are_those_of_all_training_samples(uncompiled, engine):
    """Also with labels that an attack replaces, and a validation part."""
    data = shared_out(classes([9, 5, 14, 2], seed=3), val_fraction=0.25)
    data.setup()
    table = count(data)
    assert len({tuple(counts) for counts in table}) == len(SIZES)
    settings = {"attack": RandomLabels(), "ids": [1]}
    by_hand = ByHand(seeded(mlp), table=table, optimizer=sgd(0.1), local_epochs=2)
    expected = run_tried_rounds(by_hand, data, **settings)
    client = Counted(seeded(mlp), optimizer=sgd(0.1), local_epochs=2)
    Counted.seen = {}
    result = run_tried_rounds(client, data, engine=engine, chunk_size=2, **settings)
    assert result.distance(expected) < 1e-10
    assert Counted.seen == dict(enumerate(table))


def test_data_without_class_ids_are_refused_before_training():
    arrays = classes(SIZES)
    arrays = replace(arrays, targets=arrays.targets[:, None].double(), num_classes=0)
    client = Counted(
        seeded(lambda: mlp(num_classes=1)), optimizer=sgd(), criterion=torch.nn.MSELoss()
    )
    with pytest.raises(ValueError, match=r"class id for each sample for Counted, .* got the task"):
        run_tried_rounds(client, shared_out(arrays), rounds=0)


class Overwriting(Counted):
    def begin(self, client):
        client.class_counts += 1


def test_counts_are_read_only():
    client = Overwriting(seeded(mlp), optimizer=sgd())
    with pytest.raises(ValueError, match=r"`begin` to leave `client.class_counts` as it is"):
        run_tried_rounds(client, shared_out(classes(SIZES)), rounds=0)
