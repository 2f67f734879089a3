"""The linear SVM's loss: the hinge, through two logits and a criterion of torch's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_federations import classes, run_rounds, sgd, shared_out
from torch import nn

from pl_fed.clients import Ditto, FedAvg
from pl_fed.models import LinearSVM

HINGE = nn.MultiMarginLoss(margin=2)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
@given(seed=st.integers(0, 2**16), size=st.integers(1, 8), scale=st.floats(0.01, 10))
@settings(max_examples=25, deadline=None)
def test_loss_is_the_hinge_of_the_score(bias, seed, size, scale):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 5, generator=draw, dtype=torch.float64)
    labels = torch.randint(2, (size,), generator=draw)
    net = LinearSVM(5, bias=bias).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=scale, generator=draw)
    loss = HINGE(net(x), labels)
    loss.backward()
    y = 2.0 * labels - 1
    score = x @ net.score.weight[0].detach() + (net.score.bias.detach() if bias else 0)
    torch.testing.assert_close(loss, (1 - y * score).clamp(min=0).mean())
    inside = (1 - y * score > 0).double()
    expected = -(inside * y) @ x / size
    torch.testing.assert_close(net.score.weight.grad[0], expected)
    if bias:
        torch.testing.assert_close(net.score.bias.grad[0], -(inside * y).mean())


def test_initial_parameters_are_zero():
    assert all((parameter == 0).all() for parameter in LinearSVM(5, bias=True).parameters())
    assert [name for name, _ in LinearSVM().named_parameters()] == ["score.weight"]


def test_class_is_the_sign_of_the_score():
    net = LinearSVM(1)
    nn.init.ones_(net.score.weight)
    assert net(torch.tensor([[-2.0], [3.0]])).argmax(1).tolist() == [0, 1]


def test_weight_decay_is_the_norm_of_the_svm():
    """A step of SGD on mean hinge + 0.01 ‖w‖², by hand."""
    data = shared_out(classes([12], num_classes=2), batch_size=12)
    x, y = data.clients.inputs.double(), 2.0 * data.clients.targets - 1
    net = LinearSVM(4)
    client = FedAvg(
        net, optimizer=sgd(0.5, weight_decay=0.02), local_steps=1, criterion=HINGE
    )  # fmt: skip
    w = torch.zeros(4, dtype=torch.float64)
    for _ in range(5):
        inside = (1 - y * (x @ w) > 0).double()
        w = w - 0.5 * (-(inside * y) @ x / 12 + 0.02 * w)
    torch.testing.assert_close(run_rounds(client, data, rounds=5).w, w)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Clients are run one by one")
def test_clients_with_linear_svms_are_stacked():
    data = shared_out(classes([9, 4, 6], num_classes=2))
    settings = {"optimizer": sgd(0.1), "local_epochs": 2, "criterion": HINGE}
    client = Ditto(LinearSVM(4, bias=True), **settings)
    first = run_rounds(client, data)
    assert first.distance(run_rounds(client, data, engine="stacked")) < 1e-12
