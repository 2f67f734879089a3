"""The nets of the papers: their sizes, their shapes, and that they go under vmap."""

import importlib
import inspect
import math
import pkgutil

import pytest
import torch
from tables import table_test
from torch import nn
from torch.func import functional_call, grad, stack_module_state
from torch.nn.functional import cross_entropy

import pl_fed.models
from pl_fed.models import (
    MLP,
    DittoCelebaCNN,
    DittoFashionCNN,
    DittoFemnistCNN,
    FedTiltCNN,
    FlameCNN,
    FlameFemnistCNN,
    LinearSVM,
    LogisticRegression,
)


def medical_mnist():
    return FlameCNN(num_classes=6, image_size=28, dropout=0.5, first_bias=False)


def moved_svm():
    """An SVM with random weights; all scores are 0 at its start."""
    net = LinearSVM(20, bias=True)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    return net


# Factory of the net, shape of a sample, number of classes, number of parameters.
NETS = [
    (moved_svm, (4, 5), 2, 21),
    (LogisticRegression, (1, 28, 28), 10, 7_850),
    (MLP, (1, 28, 28), 10, 109_386),
    (lambda: MLP(hidden=[300, 100]), (784,), 10, 266_610),
    (lambda: MLP(20, [], 2), (4, 5), 2, 42),
    (DittoFashionCNN, (1, 28, 28), 10, 3_274_634),
    (DittoFemnistCNN, (1, 28, 28), 62, 222_078),
    # 896 + 3 * 9248 for the convolutions, 4 * 64 for the normalisations, 6 * 6 * 32 * 2 + 2.
    (DittoCelebaCNN, (3, 84, 84), 2, 31_202),
    (FlameCNN, (3, 32, 32), 10, 268_650),
    (medical_mnist, (3, 28, 28), 6, 206_678),
    (FlameFemnistCNN, (1, 28, 28), 62, 214_590),
    # 896 + 18,496 + 73,856 for the convolutions, 4 * 4 * 128 * 10 + 10.
    (FedTiltCNN, (3, 32, 32), 10, 113_738),
]
each_net = pytest.mark.parametrize(("make", "shape", "num_classes", "num_parameters"), NETS)


def public_classes():
    for module in pkgutil.iter_modules(pl_fed.models.__path__):
        if not module.name.startswith("_"):
            name = f"pl_fed.models.{module.name}"
            for _, member in inspect.getmembers(importlib.import_module(name), inspect.isclass):
                if member.__module__ == name and not member.__name__.startswith("_"):
                    yield member


@pytest.mark.slow
@pytest.mark.parametrize("member", list(public_classes()))
def test_every_public_class_is_exported_and_tested_here(member):
    assert getattr(pl_fed.models, member.__name__, None) is member
    # most of a frozen body has no gradient; torch cannot stack recurrent layers
    elsewhere = {pl_fed.models.FrozenBody, pl_fed.models.CharacterGRU, pl_fed.models.LoRA}
    elsewhere |= {pl_fed.models.Adapter, pl_fed.models.HuggingFaceModel}  # test_lora.py
    assert member in {type(make()) for make, *_ in NETS} | elsewhere


@each_net
def test_number_of_parameters(make, shape, num_classes, num_parameters):
    assert sum(parameter.numel() for parameter in make().parameters()) == num_parameters


@pytest.mark.slow
@each_net
def test_logits_and_gradients(make, shape, num_classes, num_parameters):
    torch.manual_seed(0)
    net = make()
    logits = net(torch.randn(5, *shape))
    assert logits.shape == (5, num_classes)
    assert (logits < 0).any()  # logits, not probabilities
    assert not torch.allclose(logits.logsumexp(1), torch.zeros(5), atol=1e-3)  # nor their logs
    cross_entropy(logits, torch.arange(5) % num_classes).backward()
    # A bias before batch normalisation has no influence, so its gradient is rounding only.
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.slow
@each_net
def test_nets_of_several_clients_under_vmap(make, shape, num_classes, num_parameters):
    torch.manual_seed(0)
    nets = [make().eval() for _ in range(2)]
    parameters, buffers = stack_module_state(nets)
    x, y = torch.randn(2, 3, *shape), torch.randint(num_classes, (2, 3))

    def loss(parameters, x, y):
        return cross_entropy(functional_call(nets[0], parameters, (x,)), y)

    assert not buffers
    stacked = torch.vmap(grad(loss), randomness="error")(parameters, x, y)
    for client, net in enumerate(nets):
        cross_entropy(net(x[client]), y[client]).backward()
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(
                stacked[name][client], parameter.grad, atol=1e-5, rtol=1e-3, msg=name
            )


@pytest.mark.slow
@each_net
def test_eval_mode_is_deterministic(make, shape, num_classes, num_parameters):
    net, x = make().eval(), torch.randn(4, *shape)
    assert torch.equal(net(x), net(x))


@pytest.mark.parametrize("make", [DittoFemnistCNN, medical_mnist])
def test_dropout_is_active_in_training(make):
    net = make().train()
    x = torch.randn(4, *next(shape for other, shape, *_ in NETS if other is make))
    assert not torch.equal(net(x), net(x))


@pytest.mark.parametrize("net", [DittoFashionCNN, DittoFemnistCNN, DittoCelebaCNN])
def test_nets_of_ditto_are_initialized_as_in_tensorflow(net):
    torch.manual_seed(0)
    for module in net().modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            area = math.prod(module.weight.shape[2:])
            fans = sum(module.weight.shape[:2]) * area
            limit = math.sqrt(6 / fans)
            assert module.weight.abs().max() <= limit
            assert float(module.weight.detach().std()) == pytest.approx(
                limit / math.sqrt(3), rel=0.15
            )
            assert (module.bias == 0).all()
    assert any((p != 0).all() for name, p in net(glorot=False).named_parameters() if "bias" in name)


def test_celeba_net_normalizes_by_the_batch_in_evaluations():
    torch.manual_seed(0)
    net, x = DittoCelebaCNN(image_size=16).eval(), torch.randn(8, 3, 16, 16)
    batch_logits = net(x[:4])
    assert not torch.allclose(batch_logits, net(x)[:4], atol=1e-3)
    # Shifted and scaled images look the same to it (up to the borders and TensorFlow's epsilon).
    first = net.layers[:2]
    torch.testing.assert_close(
        first(x * 100)[..., 1:-1, 1:-1], first(x)[..., 1:-1, 1:-1], atol=0.02, rtol=0.02
    )


def test_image_sizes_and_channels():
    assert DittoFashionCNN(3, 7, image_size=32)(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    assert DittoFemnistCNN(3, 7, image_size=30)(torch.zeros(2, 3, 30, 30)).shape == (2, 7)
    assert DittoCelebaCNN(1, 7, image_size=21)(torch.zeros(2, 1, 21, 21)).shape == (2, 7)
    assert FlameCNN(1, 7, image_size=8)(torch.zeros(2, 1, 8, 8)).shape == (2, 7)
    assert FlameFemnistCNN(2, 7, image_size=5)(torch.zeros(2, 2, 5, 5)).shape == (2, 7)
    assert FedTiltCNN(1, 7, 28, widths=[4, 8])(torch.zeros(2, 1, 28, 28)).shape == (2, 7)


@table_test(
    ("make", "message"),
    [
        (lambda: LinearSVM(0), "`in_features` to be at least 1 but got 0"),
        (lambda: LogisticRegression(0), "`in_features` to be at least 1 but got 0"),
        (lambda: MLP(num_classes=0), "`num_classes` to be at least 1 but got 0"),
        (lambda: MLP(hidden=[5, -1]), "`hidden` to be at least 1 but got -1"),
        (lambda: DittoFashionCNN(image_size=3), "`image_size` to be at least 4 but got 3"),
        (lambda: DittoFemnistCNN(dropout=1.0), r"`dropout` to be in \[0, 1\) but got 1\.0"),
        (lambda: DittoFemnistCNN(dense_dropout=-0.1), r"`dense_dropout` .* but got -0\.1"),
        (lambda: DittoCelebaCNN(image_size=1), "`image_size` to be at least 2 but got 1"),
        (lambda: FlameCNN(dropout=float("nan")), "`dropout` .* but got nan"),
        (lambda: FlameFemnistCNN(in_channels=0), "`in_channels` to be at least 1 but got 0"),
        (lambda: FedTiltCNN(widths=[]), "`widths` to name at least one block but got none"),
        (lambda: FedTiltCNN(image_size=7), "`image_size` to be at least 8 but got 7"),
    ],
)
def test_impossible_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_sizes_must_be_integers():
    for make in (lambda: MLP(7.5), lambda: FlameCNN(num_classes=True)):
        with pytest.raises(TypeError, match="to be an integer but got"):
            make()
