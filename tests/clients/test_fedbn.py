"""The layers that FedBN keeps; FedPer's tests check the training."""

import pytest
import torch
from small_federations import classes, mlp, run_rounds, seeded, sgd, shared_out
from torch import nn

from pl_fed.clients import FedAvg, FedBN


def net(norm):
    return nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, 3))


def instance_norm():
    norm = nn.InstanceNorm1d(2, affine=True)
    return nn.Sequential(nn.Unflatten(1, (2, 3)), norm, nn.Flatten())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "numbers"),
    [
        (nn.BatchNorm1d(6), (12, 12)),
        (nn.BatchNorm1d(6, affine=False), (0, 12)),
        (nn.BatchNorm1d(6, track_running_stats=False), (12, 0)),
        (nn.LayerNorm(6), (12, 0)),
        (nn.GroupNorm(2, 6), (12, 0)),
        (nn.RMSNorm(6), (6, 0)),
        (instance_norm(), (4, 0)),
    ],
    ids=lambda case: type(case).__name__,
)
def test_clients_keep_every_kind_of_normalisation_layer(norm, numbers):
    client = FedBN(seeded(lambda: net(norm)), optimizer=sgd(0.1))
    assert client.own == (("1.1",) if isinstance(norm, nn.Sequential) else ("1",))
    assert (len(client.own_positions), len(client.own_statistics)) == numbers
    result = run_rounds(client, shared_out(classes([8, 3, 10])))
    assert result.states["own"].shape == (3, numbers[0])
    if numbers[0]:
        assert len(result.states["own"].unique(dim=0)) == 3
    if numbers[1]:
        assert len(result.v_statistics.unique(dim=0)) == 3


@pytest.mark.slow
def test_frozen_normalisation_equals_fedavg():
    """A frozen layer has no state to keep: FedBN equals FedAvg bit for bit."""
    norm = nn.LayerNorm(6)
    frozen = nn.LayerNorm(6).requires_grad_(False)
    data, settings = shared_out(classes([8, 3, 10])), {"optimizer": sgd(0.1), "local_epochs": 2}

    def both():
        return nn.Sequential(*net(norm)[:3], frozen, nn.Linear(6, 3))

    client = FedBN(seeded(both), **settings)
    assert client.own == ("1",)
    result = run_rounds(FedBN(seeded(both), own=[], **settings), data)
    assert torch.equal(result.w, run_rounds(FedAvg(seeded(both), **settings), data).w)


def test_a_net_without_normalisation_is_refused():
    with pytest.raises(ValueError, match=r"`net` to have a normalisation layer .* got Sequential"):
        FedBN(seeded(mlp))
    assert FedBN(seeded(mlp), own=["0.bias"]).own == ("0.bias",)


def test_frozen_layers_are_not_personal():
    body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).requires_grad_(False)
    net = nn.Sequential(body, nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    assert FedBN(net).own == ("2",)
    with pytest.raises(ValueError, match="normalisation layer with trainable parameters but"):
        FedBN(nn.Sequential(body, nn.Linear(6, 3)))
