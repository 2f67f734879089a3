"""Images with channels last, in compiled steps and in evaluations."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_federations import classes, run_rounds, seeded, sgd, shared_out
from test_compiled import assert_engine_warnings, needs_a_compiler
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

from pl_fed import Federation
from pl_fed.clients import Ditto, FedAvg
from pl_fed.engine.channels_last import ChannelsLast
from pl_fed.engine.choice import COMPILED
from pl_fed.evaluation import model_runner
from pl_fed.samplers import All

LAST = {"memory_format": torch.channels_last}


class OperatorResults(TorchDispatchMode):
    """Operator results: keeps the last result of each operator, by the operator's name."""

    def __init__(self):
        super().__init__()
        self.results = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.results[str(func)] = result
        return result


def operator_results(function):
    """Return the last result of each operator that runs with channels last, by name."""
    with OperatorResults() as outside, ChannelsLast():
        function()
    return outside.results


def compare_layouts(function, *tensors):
    """Return a function's result and gradients, in torch's layout and with channels last."""
    results = []
    for layout in (nullcontext, ChannelsLast):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        with layout():
            result = function(*leaves)
            result.square().sum().backward()
        results.append([result.detach(), *(leaf.grad for leaf in leaves)])
    return results


@pytest.mark.slow
@given(
    shape=st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(3, 7)] * 2),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 1),
    ceil_mode=st.booleans(),
    levels=st.integers(2, 50),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@settings(max_examples=80, deadline=None)
def test_pooling_with_ties_gives_equal_results_in_both_layouts(
    shape, kernel, stride, padding, ceil_mode, levels, dtype
):
    assume(2 * padding <= kernel)
    x = torch.randint(levels, shape).to(dtype)
    options = {"stride": stride, "padding": padding, "ceil_mode": ceil_mode}
    expected, actual = compare_layouts(lambda x: F.max_pool2d(x, kernel, **options), x)
    assert all(map(torch.equal, expected, actual))


@given(
    shape=st.tuples(*[st.integers(1, 4)] * 2, *[st.integers(3, 7)] * 2),
    filters=st.integers(1, 4),
    stride=st.integers(1, 2),
    bias=st.booleans(),
)
@settings(max_examples=40, deadline=None)
@pytest.mark.slow
def test_convolution_gives_equal_results_in_both_layouts(shape, filters, stride, bias):
    x, weight = torch.randn(shape), torch.randn(filters, shape[1], 3, 3)
    tensors = [x, weight, torch.randn(filters)] if bias else [x, weight]
    expected, actual = compare_layouts(lambda *args: F.conv2d(*args, stride=stride), *tensors)
    for a, b in zip(expected, actual):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3)


def test_images_keep_channels_last_after_the_first_convolution():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3)
    )
    results = operator_results(lambda: net(torch.randn(2, 1, 12, 12)).sum().backward())
    names = ["aten.convolution.default", "aten.relu.default", "pl_fed.max_pool2d.default"]
    names += ["aten.threshold_backward.default", "pl_fed.max_pool2d_backward.default"]
    for name in names:
        first = results[name][0] if isinstance(results[name], tuple) else results[name]
        assert first.is_contiguous(**LAST), name
        assert not first.is_contiguous(), name


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_pooling_returns_channels_last(device):
    x = torch.randn(2, 4, 6, 6).to(device, **LAST)
    y, indices = torch.ops.pl_fed.max_pool2d(x, [2, 2])
    back = torch.ops.pl_fed.max_pool2d_backward(
        y, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices
    )
    assert all(tensor.is_contiguous(**LAST) for tensor in (y, indices, back))
    assert y.shape == indices.shape == (2, 4, 3, 3)
    assert back.shape == x.shape


def test_unsupported_operators_keep_their_layout():
    def names(function, x):
        return set(operator_results(lambda: function(x)))

    image, conv, pool = torch.randn(2, 3, 6, 6), nn.Conv2d(3, 2, 3), nn.MaxPool2d(2)
    copy = "aten.to.dtype_layout"
    assert copy in names(conv, image)
    assert copy not in names(conv.double(), image.double())  # it is not oneDNN's
    assert copy not in names(nn.Conv1d(3, 2, 3), image[..., 0])
    assert "pl_fed.max_pool2d.default" in names(pool, image)
    assert "pl_fed.max_pool2d.default" not in names(pool, image[0])
    assert not names(nn.Flatten(), image) & {copy, "aten.clone.default"}


class Viewing(nn.Module):
    """A net that flattens its features by ``view``, which needs contiguous memory."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.head = nn.Linear(4 * 4 * 4, 3)

    def forward(self, x):
        features = F.max_pool2d(torch.relu(self.conv(x)), 2)
        return self.head(features.view(-1, 64))


class Masking(nn.Module):
    """A net that masks its features through a view of them."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)

    def forward(self, x):
        features = self.conv(x)
        features.view(len(x), -1)[:, ::2] = 0
        return features.flatten(1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_net_that_writes_through_a_view_is_evaluated_as_without_channels_last(mode):
    net, runner = seeded(Masking), object.__new__(model_runner.ModelRunner)
    runner.client, runner._convolves = FedAvg(net), True
    x = torch.randn(3, 1, 6, 6)
    with mode():
        outputs = runner.predict(net, x)
        torch.testing.assert_close(outputs, net(x))
        assert not outputs[:, ::2].any()


def run(client, engine):
    data = shared_out(classes([8, 4, 8], shape=(1, 8, 8)), batch_size=4)
    return run_rounds(client, data, engine=engine, dtype=torch.float32)


@pytest.mark.exhaustive
@needs_a_compiler
@pytest.mark.parametrize("engine", COMPILED)
def test_compiled_run_of_a_net_with_a_view_equals_eager_run(engine):
    """pl_fed detects that torch 2.9 compiles wrong gradients of a stack's convolutions."""
    client = FedAvg(seeded(Viewing), sgd(0.1), local_epochs=2)
    eager = run(client, "one_by_one")
    is_wrong = engine == "stacked_compiled" and torch.__version__.startswith("2.9.")
    with assert_engine_warnings(*["Local steps run eagerly"] * is_wrong):
        assert eager.distance(run(client, engine)) <= 1e-6


@pytest.mark.slow
def test_compiled_steps_pool_with_channels_last(uncompiled):
    run(Ditto(seeded(Viewing), 0.5, optimizer=sgd(0.1), local_epochs=2), "one_by_one_compiled")
    (graph,) = uncompiled
    pools = [str(node.target) for node in graph.graph.nodes if "max_pool" in str(node.target)]
    expected = ["pl_fed.max_pool2d.default", "pl_fed.max_pool2d_backward.default"]
    assert sorted(pools) == sorted(2 * expected)  # one of each for each model


def flat():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.parametrize(("net", "has_convolution"), [(Viewing, True), (flat, False)])
def test_models_with_convolutions_are_evaluated_with_channels_last(
    net, has_convolution, monkeypatch
):
    def evaluate():
        """Return the evaluator's tables, and the names of the operators."""
        client = Ditto(seeded(net), 0.5)
        data = shared_out(classes([5, 3], shape=(1, 8, 8)))
        federation = Federation(All(), seed=0)
        federation.setup(client, data, "validate")
        client.global_model.register_forward_pre_hook(lambda _, x: sizes.append(len(x[0])))
        with OperatorResults() as operators:
            args = (data.clients, "train", torch.arange(2), ["global", "personal"])
            tables = federation.session.evaluation.evaluator.tables(*args)
        return tables, operators.results.keys()

    sizes = []
    monkeypatch.setattr(model_runner, "_CONVOLUTION_BATCH", 3)
    tables, names = evaluate()
    assert sizes == ([3, 3, 2] if has_convolution else [8])
    assert ("pl_fed.max_pool2d.default" in names) == has_convolution
    monkeypatch.setattr(model_runner, "ChannelsLast", lambda **_: nullcontext())
    monkeypatch.setattr(model_runner, "_CONVOLUTION_BATCH", 1024)
    expected, names = evaluate()
    assert "pl_fed.max_pool2d.default" not in names
    for model in tables:
        for table, expected_table in zip(tables[model], expected[model]):
            torch.testing.assert_close(table, expected_table)
