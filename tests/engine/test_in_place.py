"""Weights of compiled steps that change in place: the rewritten graphs and their numbers."""

import pytest
import torch
from further_cases import mark_further
from small_federations import classes, run_rounds, seeded, sgd, shared_out
from test_compiled import assert_engine_warnings, needs_a_compiler
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from pl_fed.clients import FedAvg
from pl_fed.engine.choice import COMPILED
from pl_fed.engine.in_place import add_products_in_place

RATE, RUNNING = torch.tensor(0.3), torch.tensor([True, False, True])


def multiply(a, b):
    return torch.mm(a, b) if a.dim() == 2 else torch.bmm(a, b)


def update(weight, running, rate, a, b):
    weight.copy_(torch.where(running, weight - rate * multiply(a, b), weight))


def decays(weight, running, rate, a, b):
    weight.copy_(torch.where(running, weight - rate * (multiply(a, b) + weight), weight))


def reads_written(weight, running, rate, a, b):
    updated = weight - rate * multiply(a, b)
    b.copy_(2 * b)
    weight.copy_(torch.where(running, updated, weight))


def rewrite(function, *tensors):
    """Return the graph of a function, and the number of products that it adds in place."""
    module = make_fx(function, tracing_mode="fake")(*[tensor.clone() for tensor in tensors])
    add_products_in_place(module.graph)
    module.recompile()
    targets = [node.target for node in module.graph.nodes]
    return module, targets.count(torch.ops.pl_fed.add_product.default)


@pytest.mark.parametrize("running", [torch.tensor(True), torch.tensor(False), RUNNING])
def test_weight_gets_its_product_in_place(running):
    lead = running.shape
    weight, a, b = torch.randn(*lead, 64, 80), torch.randn(*lead, 64, 5), torch.randn(*lead, 5, 80)
    a[~running] = torch.nan  # gradients of clients that do not run
    running = running.view(-1, 1, 1) if running.dim() else running
    tensors = (running, RATE, a, b)
    module, count = rewrite(update, weight, *tensors)
    assert count == 1
    expected = weight.clone()
    update(expected, *tensors)
    module(weight, *tensors)
    torch.testing.assert_close(weight, expected)


@pytest.mark.parametrize(
    ("function", "width"),
    [(update, 8), (decays, 80), (reads_written, 80)],
    ids=["small", "weight decay", "factor that changes before"],
)
def test_other_updates_stay(function, width):
    weight, a, b = torch.randn(64, width), torch.randn(64, 5), torch.randn(5, width)
    assert rewrite(function, weight, torch.tensor(True), RATE, a, b)[1] == 0


def wide_net():
    """Return a net whose weight gets its product in place, and whose bias does not."""
    return nn.Linear(64, 70)


class FillsMissing(nn.Module):
    def forward(self, inputs):
        return inputs.nan_to_num(0.5)


@needs_a_compiler
@pytest.mark.slow
@pytest.mark.parametrize("engine", mark_further(COMPILED, ["one_by_one_compiled"]))
def test_compiled_run_with_missing_values_equals_eager_run(engine):
    """Only the augmentation fills missing values: clients without further steps keep them."""
    arrays = classes([8, 4, 12, 4], (64,), num_classes=70)  # minibatches of 4
    arrays.inputs[:, 3] = torch.nan
    data = shared_out(arrays, augment=[FillsMissing()])
    client = FedAvg(seeded(wide_net), optimizer=sgd(0.1), local_epochs=2)
    eager = run_rounds(client, data)
    with assert_engine_warnings():
        compiled = run_rounds(client, data, engine=engine, chunk_size=3)
    assert compiled.w.isfinite().all()
    assert eager.distance(compiled) <= 1e-10
