"""Keyed dropout: the rates of torch's, and draws that depend on their key alone."""

import copy

import pytest
import torch
from small_federations import run_rounds, sgd, shared_out
from torch import nn
from torch.utils.checkpoint import checkpoint

from pl_fed.clients import Local
from pl_fed.data.source import Arrays
from pl_fed.nets.dropout import Draws, KeyedDropout, key_dropouts
from pl_fed.random import key

MANY = torch.ones(100, 1000)


def layer(p=0.3, number=0, draws=None, channelwise=False):
    return KeyedDropout(p, number, draws or drawing("test"), channelwise)


def drawing(purpose, *parts):
    draws = Draws()
    draws.start(key(0, purpose, *parts))
    return draws


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate_and_scale(p):
    """100,000 draws: the share that is kept lies within 4 standard deviations."""
    out = layer(p)(MANY)
    kept = out != 0
    assert float(kept.double().mean()) == pytest.approx(1 - p, abs=4 * (p * (1 - p) / 1e5) ** 0.5)
    torch.testing.assert_close(out[kept], torch.full((int(kept.sum()),), 1 / (1 - p)))


def test_the_gradient_is_the_mask():
    x = MANY.clone().requires_grad_()
    out = layer(0.5)(x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_evaluation_changes_nothing(p):
    assert layer(p).eval()(MANY) is MANY


def test_the_edges():
    assert layer(0.0)(MANY) is MANY
    assert torch.equal(layer(1.0)(MANY), torch.zeros_like(MANY))


def test_channels_are_dropped_as_a_whole():
    out = layer(0.5, channelwise=True)(torch.ones(64, 32, 3, 3))
    assert torch.equal(out.amax((2, 3)), out.amin((2, 3)))
    assert float((out[:, :, 0, 0] == 0).double().mean()) == pytest.approx(0.5, abs=0.05)


def agreement(first, second):
    """Share of elements on which two masks agree: 1/2 for independent ones with p = 1/2."""
    return float(((first(MANY) != 0) == (second(MANY) != 0)).double().mean())


def draws_of(**changed):
    parts = {"client": 3, "step": 4, "round": 5} | changed
    return drawing("layers", *parts.values())


@pytest.mark.parametrize("changed", [{"client": 4}, {"step": 5}, {"round": 6}], ids=str)
def test_clients_steps_and_rounds_draw_independently(changed):
    same = agreement(layer(0.5, draws=draws_of()), layer(0.5, draws=draws_of()))
    other = agreement(layer(0.5, draws=draws_of()), layer(0.5, draws=draws_of(**changed)))
    assert same == 1
    assert other == pytest.approx(0.5, abs=0.01)


def test_layers_draw_independently():
    assert agreement(layer(0.5, 0), layer(0.5, 1)) == pytest.approx(0.5, abs=0.01)


def test_a_layer_used_twice_draws_anew():
    twice = layer(0.5)
    assert agreement(twice, twice) == pytest.approx(0.5, abs=0.01)


def test_a_step_begins_from_the_start():
    twice = layer(0.5)
    first = twice(MANY), twice(MANY)
    twice.draws.start(twice.draws.key)
    assert torch.equal(first[0], twice(MANY))
    assert torch.equal(first[1], twice(MANY))


def test_a_sample_keeps_its_draws_in_a_padded_batch():
    assert torch.equal(layer(0.5)(MANY)[:7], layer(0.5)(MANY[:7]))


@pytest.mark.parametrize("channelwise", [False, True])
def test_under_vmap_each_client_draws_by_its_own_key(channelwise):
    x = torch.ones(5, 4, 6, 3)
    keys = torch.tensor([key(0, "layers", client) for client in range(5)])
    draws = Draws()
    dropout = layer(0.5, 2, draws, channelwise)

    def one(x, key):
        draws.start(key)
        return dropout(x), dropout(x)

    stacked = torch.vmap(one)(x, keys)
    for client in range(5):
        for found, expected in zip(stacked, one(x[client], int(keys[client]))):
            assert torch.equal(found[client], expected)


# Taking a net in


def test_every_kind_is_exchanged_and_numbered():
    net = nn.Sequential(
        nn.Dropout(0.1), nn.Sequential(nn.Dropout1d(0.2), nn.Dropout2d(0.3)), nn.Dropout3d(0.4)
    )
    key_dropouts(net.eval(), Draws())
    found = [net[0], net[1][0], net[1][1], net[2]]
    assert [each.p for each in found] == [0.1, 0.2, 0.3, 0.4]
    assert [each.channelwise for each in found] == [False, True, True, True]
    assert sorted(each.layer for each in found) == [0, 1, 2, 3]
    assert not any(each.training for each in found)


def test_a_layer_known_by_two_names_stays_one():
    net = nn.Module()
    net.first = net.second = nn.Dropout(0.5)
    net.inner = nn.Sequential(net.first)
    key_dropouts(net, Draws())
    assert isinstance(net.first, KeyedDropout)
    assert net.first is net.second is net.inner[0]


def test_a_net_that_is_taken_in_again_draws_from_the_new_place():
    net = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    key_dropouts(net, Draws())
    larger, draws = nn.Sequential(nn.Dropout(0.5), copy.deepcopy(net)), Draws()
    key_dropouts(larger, draws)
    layers = [larger[0], larger[1][0], larger[1][1]]
    assert all(each.draws is draws for each in layers)
    assert sorted(each.layer for each in layers) == [0, 1, 2]


def test_other_layers_are_left_alone():
    class Own(nn.Dropout):
        pass

    net = nn.Sequential(nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5), Own(0.5))
    key_dropouts(net, Draws())
    assert [type(each) for each in net] == [nn.AlphaDropout, nn.FeatureAlphaDropout, Own]


class Checkpointed(nn.Module):
    """A net that forgets the activations of a part, and makes them again in the backward pass."""

    def __init__(self, forgets, twice=False):
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Tanh())
        self.last, self.forgets, self.twice = nn.Linear(16, 3), forgets, twice

    def forward(self, x):
        for _ in range(1 + self.twice):
            y = checkpoint(self.part, x, use_reentrant=False) if self.forgets else self.part(x)
        return self.last(y)


def gradient(net):
    torch.manual_seed(0)
    draws, x = drawing("test"), torch.ones(5, 4)
    key_dropouts(net, draws)
    net(x).sum().backward()
    return net.part[0].weight.grad


def test_activation_checkpointing_drops_the_same_again():
    made = []
    for forgets in (False, True):
        torch.manual_seed(0)
        made.append(gradient(Checkpointed(forgets)))
    assert torch.equal(*made)


def test_activation_checkpointing_of_a_layer_used_twice_is_refused():
    with pytest.raises(ValueError, match="to be called once a step but got one that is called 2 "):
        gradient(Checkpointed(True, twice=True))


@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_clients_with_equal_samples_have_different_masks(engine):
    targets, owners = torch.zeros(12, dtype=torch.int64), torch.arange(12) // 6
    data = shared_out(Arrays(torch.ones(12, 4), targets, owners, num_classes=3), batch_size=6)

    def personal_models(p):
        client = Local(nn.Sequential(nn.Dropout(p), nn.Linear(4, 3)), sgd(), local_steps=1)
        return run_rounds(client, data, rounds=1, engine=engine).v

    first, second = personal_models(0.0)
    torch.testing.assert_close(first, second)
    first, second = personal_models(0.5)
    assert not torch.allclose(first, second)
