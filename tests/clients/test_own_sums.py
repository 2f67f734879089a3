"""Passes over a client's own samples: against loops, in all engines and stages."""

import pytest
import torch
from exhaustive import exhaustive_but
from small_federations import classes, mlp, run_tried_rounds, seeded, sgd, shared_out
from torch import nn

from pl_fed import Federation
from pl_fed.clients import Client
from pl_fed.clients.contract import Model
from pl_fed.samplers import Uniform

SIZES = [7, 3, 10, 2]


class Means(Client):
    """A pull of features to the client's mean features at the start of the round, under w^t.

    A client keeps its sums of features by class under its own model at the end of the round.
    """

    def __init__(self, net, **kwargs):
        super().__init__(net, models={"personal": Model()}, **kwargs)
        self.add_state("sums", lambda: torch.zeros(15, dtype=self.initial_row().dtype))

    def begin(self, client):
        if client.steps:
            sums = self.own_sums(client, self.sum_features)
            client.extra["mean"] = sums / client.samples
            values = self.own_values(client, lambda batch: self.features_of("global", batch))
            assert values.shape == (len(client), int(client.samples.max()), 5)
            torch.testing.assert_close(values.sum(1), sums)

    def sum_features(self, batch):
        features = self.features_of("global", batch)
        return torch.where(batch.mask[:, None], features, 0).sum(0)

    def sum_classes(self, batch):
        """Add the features by class, weighted by a row of the client."""
        features = self.read("samples") * self.features_of("personal", batch)
        member = (batch.targets == torch.arange(3)[:, None]) & batch.mask
        return member.to(features) @ features

    def training_step(self, batch, batch_idx):
        difference = self.features_of("personal", batch) - self.read("mean")
        weights = torch.ones(batch.size) if batch.mask is None else batch.mask
        pull = (weights * difference.square().sum(1)).sum() / weights.sum()
        return self.loss("personal", batch) + pull

    def end_round(self, client):
        client.states["sums"] = self.own_sums(client, self.sum_classes).flatten(1)
        return client.models["personal"].parameters - client.broadcast.parameters


def convolution():
    """Return a net that is visited one by one on a CPU."""
    body = nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 5)
    return nn.Sequential(*body, nn.Linear(5, 3))


def check_sums(outcome, data, net):
    net = net.double()
    for client, samples in enumerate(data.clients.train.samples(k) for k in range(len(SIZES))):
        nn.utils.vector_to_parameters(outcome.v[client], net.parameters())
        expected = torch.zeros(3, 5, dtype=torch.float64)
        for sample in samples:
            x = data.clients.inputs[sample].double()[None]
            expected[data.clients.targets[sample]] += len(samples) * net[:-1](x)[0].detach()
        torch.testing.assert_close(outcome.states["sums"][client], expected.flatten())


@exhaustive_but("mlp")
@pytest.mark.parametrize("make", [mlp, convolution])
@pytest.mark.slow
def test_sums_equal_loops_over_the_samples_in_all_engines(make, monkeypatch):
    data = shared_out(classes(SIZES, seed=2))
    client = Means(seeded(make), optimizer=sgd(0.1), local_epochs=2)
    outcomes = [
        run_tried_rounds(client, data, engine=engine, chunk_size=size)
        for engine, size in (("one_by_one", 1), ("one_by_one", None), ("stacked", None))
    ]
    monkeypatch.setattr("pl_fed.engine.own_samples._BATCH", 3)
    monkeypatch.setattr("pl_fed.engine.own_samples._STACK_BATCH", 8)
    outcomes += [run_tried_rounds(client, data, engine="stacked", chunk_size=s) for s in (1, 3)]
    for outcome in outcomes:
        assert outcome.distance(outcomes[0]) < 1e-10
    check_sums(outcomes[0], data, seeded(make))


@pytest.mark.slow
@pytest.mark.parametrize("stacks", [True, False])
def test_a_round_before_an_evaluation_has_data_of_all_parts(stacks):
    """Clients without samples of a part have zeros there."""
    data = shared_out(classes([9, 5, 12, 1]), val_fraction=0.25)
    client = Means(seeded(mlp), optimizer=sgd())
    federation = Federation(Uniform(2), seed=0)
    federation.setup(client, data, "fit")
    assert 0 in data.clients.val.sizes.tolist()
    states = federation.session.states
    states._find_own_samples().stacks = stacks
    start = states.begin(torch.tensor([3, 0, 2]))

    def count(batch):
        return torch.stack([batch.mask.sum(), (batch.targets * batch.mask).sum()])

    sums = client.own_sums(start, count, "val")
    labels = client.own_values(start, lambda batch: batch.targets + 1, "val")
    for position, k in enumerate([3, 0, 2]):
        targets = data.clients.targets[data.clients.val.samples(k)]
        assert sums[position].tolist() == [len(targets), int(targets.sum())]
        assert labels[position, : len(targets)].tolist() == (targets + 1).tolist()
        assert not labels[position, len(targets) :].any()


@pytest.mark.parametrize("stacks", [True, False])
def test_a_part_without_samples_of_any_client_has_sums_of_zero(stacks):
    client = Means(seeded(mlp), optimizer=sgd())
    federation = Federation(Uniform(2), seed=0)
    federation.setup(client, shared_out(classes(SIZES)), "fit")
    states = federation.session.states
    states._find_own_samples().stacks = stacks
    start = states.begin(torch.tensor([3, 0]))
    assert client.own_sums(start, lambda batch: batch.mask.sum(), "val").tolist() == [0, 0]
    assert not client.own_values(start, lambda batch: batch.inputs, "val").any()
    assert states._find_own_samples().stacks == stacks


class DataDependent(Means):
    def sum_features(self, batch):
        if batch.targets.sum() > 1e9:  # vmap cannot read it
            raise RuntimeError
        return super().sum_features(batch)


@pytest.mark.slow
def test_a_function_that_cannot_be_stacked_runs_one_by_one():
    data = shared_out(classes(SIZES, seed=2))
    settings = {"optimizer": sgd(0.1), "local_epochs": 2}
    expected = run_tried_rounds(Means(seeded(mlp), **settings), data, engine="stacked")
    result = run_tried_rounds(DataDependent(seeded(mlp), **settings), data, engine="stacked")
    assert result.distance(expected) < 1e-10


@pytest.mark.slow
def test_dropout_does_not_change_a_pass():
    def make():
        return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 3))

    data = shared_out(classes(SIZES, seed=2))
    client = Means(seeded(make), optimizer=sgd(0.1), local_epochs=1)
    outcome = run_tried_rounds(client, data, engine="stacked")
    check_sums(outcome, data, seeded(make).eval())


def test_a_round_without_data_is_refused():
    client = Means(seeded(mlp), optimizer=sgd())
    with pytest.raises(ValueError, match="got a round without data"):
        client.run_begin(client.new_round(clients=2, samples=5))
