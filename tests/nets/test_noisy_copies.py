"""Noisy copies of a net, and their votes."""

import pytest
import torch
from torch import nn

from pl_fed import Smoothing
from pl_fed.nets.noisy_copies import noisy_copies


def test_copies_have_the_standard_deviation_and_the_net_stays():
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    copies = noisy_copies(net, std=0.5, num_models=2000, seed=3)
    weights = torch.cat([copy[0].weight.clone() for copy in copies])
    assert weights.std() == pytest.approx(0.5, rel=0.1)
    assert weights.mean() == pytest.approx(float(before["0.weight"]), abs=0.05)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert net.training


def test_copies_depend_on_the_seed_only():
    net, inputs = nn.Linear(2, 3), torch.ones(4, 2)

    def outputs(num_models, seed):
        copies = noisy_copies(net, std=1.0, num_models=num_models, seed=seed)
        return torch.stack([copy(inputs) for copy in copies])

    assert torch.equal(outputs(2, 0), outputs(5, 0)[:2])
    assert not torch.equal(outputs(2, 0), outputs(2, 1))
    (exact,) = [copy(inputs) for copy in noisy_copies(net, std=0.0, num_models=1)]
    assert torch.equal(exact, net(inputs))


def test_scores_are_the_logarithms_of_votes_with_one_more_for_each_class():
    net, inputs = nn.Linear(2, 3, bias=False), torch.randn(6, 2)
    classes = [copy(inputs).argmax(1) for copy in noisy_copies(net, std=1.0, num_models=9, seed=5)]
    votes = torch.nn.functional.one_hot(torch.stack(classes), 3).sum(0)
    smoothing = Smoothing(std=1.0, num_models=9)
    scores = smoothing.score(net, lambda copy: copy(inputs).argmax(1), 3, seed=5)
    assert votes.max(1).values.min() < 9, "copies differ"
    torch.testing.assert_close(scores.exp() * 12 - 1, votes.float())


def test_net_is_restored_after_an_error():
    net = nn.Linear(2, 3)
    before = net.weight.detach().clone()
    with pytest.raises(ZeroDivisionError):
        Smoothing(std=1.0, num_models=2).score(net, lambda copy: 1 / 0, 3, seed=0)
    assert torch.equal(net.weight, before)
