"""Keyed dropout: the rates of torch's, and draws that depend on their key alone."""

import copy
import pickle

import pytest
import torch
from small_federations import run_rounds, sgd, shared_out
from torch import nn
from torch.utils.checkpoint import checkpoint

from pl_fed.clients import Local
from pl_fed.data.source import Arrays
from pl_fed.nets.dropout import Draws, KeyedDropout, key_dropouts, unkey_dropouts
from pl_fed.random import key

MANY = torch.ones(100, 1000)


def make_layer(p=0.3, number=0, draws=None, channelwise=False):
    net = nn.Sequential((nn.Dropout2d if channelwise else nn.Dropout)(p))
    key_dropouts(net, draws or make_draws("test"))
    net[0].layer = number
    return net[0]


def make_draws(purpose, *parts):
    draws = Draws()
    draws.start(key(0, purpose, *parts))
    return draws


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate_and_scale(p):
    """100,000 draws: the share of non-zero elements is within 4 standard deviations."""
    out = make_layer(p)(MANY)
    nonzero = out != 0
    assert float(nonzero.double().mean()) == pytest.approx(
        1 - p, abs=4 * (p * (1 - p) / 1e5) ** 0.5
    )
    torch.testing.assert_close(out[nonzero], torch.full((int(nonzero.sum()),), 1 / (1 - p)))


def test_gradient_equals_the_mask():
    x = MANY.clone().requires_grad_()
    out = make_layer(0.5)(x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_evaluation_changes_nothing(p):
    assert make_layer(p).eval()(MANY) is MANY


def test_rates_zero_and_one():
    assert make_layer(0.0)(MANY) is MANY
    assert torch.equal(make_layer(1.0)(MANY), torch.zeros_like(MANY))


def test_channelwise_dropout_drops_complete_channels():
    out = make_layer(0.5, channelwise=True)(torch.ones(64, 32, 3, 3))
    assert torch.equal(out.amax((2, 3)), out.amin((2, 3)))
    assert float((out[:, :, 0, 0] == 0).double().mean()) == pytest.approx(0.5, abs=0.05)


def agreement(first, second):
    """Share of elements on which two masks agree: 1/2 for independent ones with p = 1/2."""
    return float(((first(MANY) != 0) == (second(MANY) != 0)).double().mean())


def make_layer_draws(**changed):
    parts = {"client": 3, "step": 4, "round": 5} | changed
    return make_draws("layers", *parts.values())


@pytest.mark.parametrize("changed", [{"client": 4}, {"step": 5}, {"round": 6}], ids=str)
def test_clients_steps_and_rounds_draw_independently(changed):
    same = agreement(
        make_layer(0.5, draws=make_layer_draws()), make_layer(0.5, draws=make_layer_draws())
    )
    other = agreement(
        make_layer(0.5, draws=make_layer_draws()),
        make_layer(0.5, draws=make_layer_draws(**changed)),
    )
    assert same == 1
    assert other == pytest.approx(0.5, abs=0.01)


def test_layers_draw_independently():
    assert agreement(make_layer(0.5, 0), make_layer(0.5, 1)) == pytest.approx(0.5, abs=0.01)


def test_two_calls_of_a_layer_draw_independently():
    twice = make_layer(0.5)
    assert agreement(twice, twice) == pytest.approx(0.5, abs=0.01)


def test_step_restarts_the_draws():
    twice = make_layer(0.5)
    first = twice(MANY), twice(MANY)
    twice.draws.start(twice.draws.key)
    assert torch.equal(first[0], twice(MANY))
    assert torch.equal(first[1], twice(MANY))


def test_draws_of_a_sample_do_not_depend_on_padding():
    assert torch.equal(make_layer(0.5)(MANY)[:7], make_layer(0.5)(MANY[:7]))


@pytest.mark.parametrize("channelwise", [False, True])
def test_clients_under_vmap_draw_by_their_keys(channelwise):
    x = torch.ones(5, 4, 6, 3)
    keys = torch.tensor([key(0, "layers", client) for client in range(5)])
    draws = Draws()
    dropout = make_layer(0.5, 2, draws, channelwise)

    def run_client(x, key):
        draws.start(key)
        return dropout(x), dropout(x)

    stacked = torch.vmap(run_client)(x, keys)
    for client in range(5):
        for actual, expected in zip(stacked, run_client(x[client], int(keys[client]))):
            assert torch.equal(actual[client], expected)


# Taking a net in


def test_all_dropout_layers_are_replaced_and_numbered():
    net = nn.Sequential(
        nn.Dropout(0.1), nn.Sequential(nn.Dropout1d(0.2), nn.Dropout2d(0.3)), nn.Dropout3d(0.4)
    )
    key_dropouts(net.eval(), Draws())
    layers = [net[0], net[1][0], net[1][1], net[2]]
    assert [make_layer.p for make_layer in layers] == [0.1, 0.2, 0.3, 0.4]
    assert [make_layer.channelwise for make_layer in layers] == [False, True, True, True]
    assert sorted(make_layer.layer for make_layer in layers) == [0, 1, 2, 3]
    assert not any(make_layer.training for make_layer in layers)


def test_layer_with_two_names_stays_a_single_layer():
    net = nn.Module()
    net.first = net.second = nn.Dropout(0.5)
    net.inner = nn.Sequential(net.first)
    key_dropouts(net, Draws())
    assert isinstance(net.first, KeyedDropout)
    assert net.first is net.second is net.inner[0]


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
def test_layer_stays_the_users_own(kind):
    """Code of Monte Carlo dropout finds it by its class or name, and sets it to training mode."""
    layer = kind(0.5, inplace=True)
    net, calls = nn.Sequential(layer), []
    hook = layer.register_forward_hook(lambda *_: calls.append(1))
    key_dropouts(net, Draws())
    assert net[0] is layer
    assert isinstance(layer, kind)
    assert type(layer).__name__.startswith(kind.__name__)
    assert isinstance(layer, nn.Dropout) == (kind is nn.Dropout)
    net(torch.ones(2, 3))
    assert calls
    hook.remove()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    unkey_dropouts(copied)
    assert type(copied[0]) is kind
    assert vars(copied[0]).keys() == vars(kind(0.5)).keys()


def test_net_inside_another_net_is_renumbered():
    net = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    key_dropouts(net, Draws())
    larger, draws = nn.Sequential(nn.Dropout(0.5), copy.deepcopy(net)), Draws()
    key_dropouts(larger, draws)
    layers = [larger[0], larger[1][0], larger[1][1]]
    assert all(make_layer.draws is draws for make_layer in layers)
    assert sorted(make_layer.layer for make_layer in layers) == [0, 1, 2]


def test_other_layers_are_unchanged():
    class Own(nn.Dropout):
        pass

    net = nn.Sequential(nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5), Own(0.5))
    key_dropouts(net, Draws())
    assert [type(make_layer) for make_layer in net] == [
        nn.AlphaDropout,
        nn.FeatureAlphaDropout,
        Own,
    ]


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
    draws, x = make_draws("test"), torch.ones(5, 4)
    key_dropouts(net, draws)
    net(x).sum().backward()
    return net.part[0].weight.grad


def test_activation_checkpointing_repeats_the_mask():
    gradients = []
    for forgets in (False, True):
        torch.manual_seed(0)
        gradients.append(gradient(Checkpointed(forgets)))
    assert torch.equal(*gradients)


def test_activation_checkpointing_of_a_layer_used_twice_is_refused():
    with pytest.raises(ValueError, match="to be called once a step but got one that is called 2 "):
        gradient(Checkpointed(True, twice=True))


@pytest.mark.slow
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
