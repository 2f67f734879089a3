"""Predictions of noisy copies of a net."""

import pytest
import torch
from torch import nn

from pl_fed.nets.noisy_copies import predict_with_noise


def test_copies_have_the_standard_deviation_and_the_net_stays():
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    weights = predict_with_noise(
        net, lambda noisy: noisy[0].weight.clone(), std=0.5, num_models=2000, seed=3
    )
    assert weights.std() == pytest.approx(0.5, rel=0.1)
    assert weights.mean() == pytest.approx(float(before["0.weight"]), abs=0.05)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert net.training


def test_copies_depend_on_the_seed_only():
    net, inputs = nn.Linear(2, 3), torch.ones(4, 2)

    def outputs(num_models, seed):
        return predict_with_noise(
            net, lambda noisy: noisy(inputs), std=1.0, num_models=num_models, seed=seed
        )

    assert torch.equal(outputs(2, 0), outputs(5, 0)[:2])
    assert not torch.equal(outputs(2, 0), outputs(2, 1))
    exact = predict_with_noise(net, lambda noisy: noisy(inputs), std=0.0, num_models=1)
    assert torch.equal(exact[0], net(inputs))


def test_net_is_restored_after_an_error():
    net = nn.Linear(2, 3)
    before = net.weight.detach().clone()
    with pytest.raises(ZeroDivisionError):
        predict_with_noise(net, lambda noisy: 1 / 0, std=1.0, num_models=1)
    assert torch.equal(net.weight, before)
