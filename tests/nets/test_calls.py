"""A module with other tensors than its own."""

import pytest
import torch
from torch import nn

from pl_fed.nets.calls import Net, swap_tensors


class Shared(nn.Module):
    """A layer with two names, and a layer with tied weights."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.first.weight

    def forward(self, x):
        return self.tied(self.second(self.first(x)))


def test_call_keeps_ties_and_leaves_the_module_unchanged():
    net = Shared()
    before = dict(net.named_parameters(remove_duplicate=False))
    weight, x = 3 * torch.eye(2), torch.tensor([[1.0, 2.0]])
    bias = torch.ones(2)
    for name in ("first", "second", "tied"):
        tensors = {f"{name}.weight": weight, "second.bias": bias, "tied.bias": bias}
        outputs = Net(net, tensors)(x)
        assert torch.equal(outputs, 3 * (3 * (3 * x + 1) + 1) + 1)
    after = dict(net.named_parameters(remove_duplicate=False))
    assert all(after[name] is tensor for name, tensor in before.items())


def test_last_tensor_of_a_tied_one_holds():
    net = Shared()
    tensors = {"first.weight": torch.zeros(2, 2), "tied.weight": torch.eye(2)}
    with swap_tensors(net, tensors):
        assert net.first.weight is net.tied.weight is tensors["tied.weight"]


def test_call_without_shared_tensors_equals_torch():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    tensors = {name: torch.rand_like(p) for name, p in net.state_dict().items() if p.dim()}
    x = torch.randn(5, 3)
    expected = torch.func.functional_call(net, dict(tensors), (x,))
    assert torch.equal(Net(net, tensors)(x), expected)


def test_gradients_pass_through_vmap():
    net, x = Shared(), torch.randn(3, 4, 2)
    weights = torch.randn(3, 2, 2)

    def loss(weight, x):
        return Net(net, {"first.weight": weight})(x).square().mean()

    stacked = torch.vmap(torch.func.grad(loss))(weights, x)
    for i in range(3):
        torch.testing.assert_close(stacked[i], torch.func.grad(loss)(weights[i], x[i]))


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="name some of weight, bias, but got wieght"):
        Net(nn.Linear(1, 1), {"wieght": torch.ones(1, 1)})(torch.ones(1, 1))


def test_module_has_its_own_tensors_after_an_error():
    net = nn.BatchNorm1d(2)
    before = net.state_dict(keep_vars=True)
    tensors = {"weight": torch.zeros(2), "running_mean": torch.zeros(2)}
    with pytest.raises(ValueError, match="expected 2D or 3D input"), swap_tensors(net, tensors):
        net(torch.zeros(1))
    assert all(net.state_dict(keep_vars=True)[name] is own for name, own in before.items())


def test_value_of_a_replaced_tensor_is_not_lost_in_silence():
    net = nn.BatchNorm1d(2)
    own = net.running_mean
    with (
        pytest.raises(RuntimeError, match="replaces the tensor running_mean in place of changing"),
        swap_tensors(net, {"running_mean": torch.zeros(2)}),
    ):
        net.running_mean = torch.ones(2)
    assert net.running_mean is own
