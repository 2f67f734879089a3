"""Features and heads of models: against the layers of the net, in all engines."""

import pytest
import torch
from exhaustive import exhaustive_for
from lightning.pytorch import LightningModule
from small_federations import classes, mlp, run_rounds, run_tried_rounds, seeded, sgd, shared_out
from tables import table_test
from torch import nn

from pl_fed.clients import Client, FedAvg, FedDBE, Moon
from pl_fed.clients.contract import Model
from pl_fed.clients.heads import find_head
from pl_fed.types import Batch

SIZES = [7, 3, 10, 2]


class SmallFeatures(Client):
    """The loss of the head on features without a gradient, and a penalty on the features.

    The penalty's features are those at half of the parameters.
    """

    def __init__(self, net, **kwargs):
        super().__init__(net, models={"global": Model(), "personal": Model()}, **kwargs)

    def training_step(self, batch, batch_idx):
        features = self.features_of("personal", batch)
        loss = self.mean_loss(self.head_of("personal", features.detach()), batch)
        half = {name: tensor / 2 for name, tensor in self.parameters_of("personal").items()}
        others = self.features_of("personal", batch, half)
        outputs = self.head_of("personal", others, half)
        weights = torch.ones(batch.size) if batch.mask is None else batch.mask
        sizes = others.square().sum(1) + outputs.square().sum(1)
        penalty = (weights * sizes).sum() / weights.sum()
        return self.loss("global", batch) + loss + 0.1 * penalty


class ByLayers(SmallFeatures):
    """The same by the layers of a sequential net."""

    def training_step(self, batch, batch_idx):
        body, head = self.personal_model[:-1], self.personal_model[-1]
        loss = self.mean_loss(head(body(batch.inputs).detach()), batch)
        first = self.personal_model[0]
        others = torch.tanh(batch.inputs @ first.weight.T / 2 + first.bias / 2)
        outputs = others @ head.weight.T / 2 + head.bias / 2
        penalty = (others.square().sum(1) + outputs.square().sum(1)).mean()
        return self.loss("global", batch) + loss + 0.1 * penalty


def run(kind, engine, chunk_size=None):
    client = kind(seeded(mlp), optimizer=sgd(0.1, momentum=0.5), local_epochs=2)
    data = shared_out(classes(SIZES, seed=2))
    return run_tried_rounds(client, data, engine=engine, chunk_size=chunk_size)


@exhaustive_for("stacked_compiled")
@pytest.mark.parametrize("engine", ["one_by_one", "stacked", "stacked_compiled"])
@pytest.mark.slow
def test_features_and_outputs_of_the_head_equal_those_of_the_layers(uncompiled, engine):
    expected = run(ByLayers, "one_by_one")
    for chunk_size in (None, 2):
        assert run(SmallFeatures, engine, chunk_size).distance(expected) < 1e-10
    assert not expected.v.allclose(expected.w.expand_as(expected.v))


def test_another_module_is_the_head():
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), mlp(inputs=5)))
    client, x = FedAvg(net), torch.randn(5, 4)
    batch = Batch(x, torch.zeros(5, dtype=torch.int64))
    assert torch.equal(client.features_of("global", batch), net[2][:2](net[:2](x)))
    client.head = "2"
    features = client.features_of("global", batch)
    assert torch.equal(features, net[:2](x))
    assert torch.equal(client.head_of("global", features), net(x))
    at = {"0.weight": torch.zeros(5, 4), "2.2.bias": torch.ones(3)}
    expected = net(x) - net[2][2].bias + 1
    torch.testing.assert_close(client.head_of("global", features, at), expected)


@table_test("head", ["1", "layers", "2.weight", "2."])
def test_unknown_heads_are_refused(head):
    names = dict(seeded(mlp).named_parameters())
    with pytest.raises(ValueError, match=rf"`head` to be a module .* 0, 2, but got '{head}'"):
        find_head(names, head)


class Squeezed(nn.Module):
    """A net whose outputs are not those of its last layer."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return 2 * self.head(torch.tanh(self.body(x)))


class Twice(Squeezed):
    def forward(self, x):
        self.head(torch.tanh(self.body(-x)))
        return self.head(torch.tanh(self.body(x)))


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Bilinear(5, 4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)), x)


@table_test(
    ("make", "problem"),
    [
        (Squeezed, "other outputs than those of the head in Squeezed"),
        (Twice, "2 calls of it in Twice"),
        (Bilinear, r"\(\[5\] \(torch.float64\), \[4\] \(torch.float64\)\) as its inputs"),
    ],
)
def test_nets_without_a_head_are_refused_before_training(make, problem):
    client = SmallFeatures(seeded(make), optimizer=sgd())
    data = shared_out(classes(SIZES))
    with pytest.raises(ValueError, match=f"`net` to call its head 'head' once, .* got {problem}"):
        run_tried_rounds(client, data, rounds=0)


def test_a_hook_does_not_outlive_the_features():
    client = SmallFeatures(seeded(Squeezed), optimizer=sgd())
    with pytest.raises(ValueError, match="got other outputs"):
        run_rounds(client, shared_out(classes(SIZES)))
    assert not client.personal_model.head._forward_hooks


@pytest.mark.parametrize("algorithm", [Moon, FedDBE])
def test_modules_with_steps_are_refused_by_algorithms_that_need_a_head(algorithm):
    class Steps(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def training_step(self, batch, batch_idx):
            inputs, classes = batch
            return nn.functional.cross_entropy(self.net(inputs), classes)

    name = algorithm.__name__
    with pytest.raises(
        ValueError,
        match=f"a net without steps of its own for {name}, which .* below its head, but got Steps",
    ):
        run_rounds(algorithm(Steps()), shared_out(classes(SIZES)), rounds=0)
