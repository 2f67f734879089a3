"""Large products of compiled steps by oneDNN, on processors where MKL is slower."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_federations import classes, run_rounds, seeded, sgd, shared_out
from test_compiled import assert_engine_warnings, needs_a_compiler
from torch import nn

from pl_fed import Federation
from pl_fed.clients import Ditto, FedAvg
from pl_fed.engine import compiled, products
from pl_fed.engine.products import FasterProducts, is_mkl_slow
from pl_fed.evaluation import model_runner
from pl_fed.samplers import All

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN"
)


class ProductCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts products by oneDNN."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.pl_fed.product.default
        return func(*args, **(kwargs or {}))


def count_products(function):
    with ProductCounter() as counter, FasterProducts():
        function()
    return counter.number


@needs_onednn
@given(
    shape=st.tuples(*[st.integers(1, 40)] * 3),
    transposed=st.tuples(st.booleans(), st.booleans()),
    bias=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_product_by_onednn_equals_matrix_product(shape, transposed, bias):
    m, k, n = shape
    a = torch.randn(k, m).t() if transposed[0] else torch.randn(m, k)
    b = torch.randn(n, k).t() if transposed[1] else torch.randn(k, n)
    offset = torch.randn(n) if bias else None
    expected = a.double() @ b.double() + (0 if offset is None else offset.double())
    product = torch.ops.pl_fed.product(a, b, offset)
    assert product.is_contiguous()  # compiled steps rely on this
    torch.testing.assert_close(product.double(), expected, rtol=0, atol=1e-4)
    assert torch.ops.pl_fed.product(a.to("meta"), b.to("meta")).shape == product.shape


@needs_onednn
def test_only_large_products_of_float32_run_by_onednn():
    large, small = torch.randn(200, 200), torch.randn(20, 20)
    assert count_products(lambda: large @ large) == 1
    assert count_products(lambda: small @ small) == 0
    assert count_products(lambda: large.double() @ large.double()) == 0
    assert count_products(lambda: large.bfloat16() @ large.bfloat16()) == 0
    assert count_products(lambda: torch.addmm(large[0], large, large)) == 1
    assert count_products(lambda: torch.addmm(large, large, large)) == 0
    assert count_products(lambda: torch.addmm(large[0], large, large, beta=2)) == 0
    net, x = nn.Linear(200, 200), large.clone().requires_grad_()
    assert count_products(lambda: net(x).sum().backward()) == 3


def wide_net():
    return nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, 3))


def run(engine, algorithm=Ditto):
    client = algorithm(seeded(wide_net), optimizer=sgd(0.1), local_epochs=2)
    data = shared_out(classes([9, 4, 8]), batch_size=4)
    return run_rounds(client, data, engine=engine, dtype=torch.float32)


@pytest.fixture
def faster_products(monkeypatch):
    """Let compiled steps run small products by oneDNN, too."""
    monkeypatch.setattr(products, "_MIN_MULTIPLICATIONS", 1000)
    monkeypatch.setattr(compiled, "is_mkl_slow", lambda: True)


@pytest.mark.slow
@needs_onednn
def test_compiled_steps_multiply_by_onednn_where_mkl_is_held_back(
    faster_products, monkeypatch, uncompiled
):
    eager, changed = run("one_by_one"), run("one_by_one_compiled")
    monkeypatch.setattr(compiled, "is_mkl_slow", lambda: False)
    run("one_by_one_compiled")
    product = torch.ops.pl_fed.product.default
    numbers = [sum(node.target is product for node in graph.graph.nodes) for graph in uncompiled]
    assert numbers == [10, 0]  # for each model: 2 forward, 3 backward
    assert eager.distance(changed) <= 1e-6


@needs_onednn
def test_evaluations_multiply_by_onednn_where_mkl_is_held_back(monkeypatch):
    monkeypatch.setattr(products, "_MIN_MULTIPLICATIONS", 1000)
    federation, data = Federation(All(), seed=0), shared_out(classes([9, 4, 8]))
    federation.setup(Ditto(seeded(wide_net)).float(), data, "validate")
    clients = data.clients.to(torch.device("cpu"), torch.float32)
    numbers, losses = [], []
    for held_back in (True, False):
        monkeypatch.setattr(model_runner, "is_mkl_slow", lambda held_back=held_back: held_back)
        with ProductCounter() as counter:
            measure = federation.session.evaluation.evaluator.start_losses
            losses.append(measure(clients, torch.arange(3), {}))
        numbers.append(counter.number)
    assert numbers == [2, 0]
    torch.testing.assert_close(*losses)


@pytest.mark.exhaustive
@needs_onednn
@needs_a_compiler
def test_compiled_run_with_products_by_onednn_equals_eager_run(faster_products):
    eager = run("one_by_one", FedAvg)  # one model: half of the kernels
    with assert_engine_warnings():
        assert eager.distance(run("one_by_one_compiled", FedAvg)) <= 1e-6


def test_mkl_is_held_back_on_amd_processors_with_avx512(monkeypatch, tmp_path):
    cpus = tmp_path / "cpuinfo"
    monkeypatch.setattr(products, "Path", lambda _: cpus)

    def held_back(vendor, capability="AVX512", mkl=True):
        cpus.write_text(f"vendor_id\t: {vendor}\n")
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
        return is_mkl_slow.__wrapped__()

    assert held_back("AuthenticAMD")
    assert not held_back("GenuineIntel")
    assert not held_back("AuthenticAMD", "AVX2")
    assert not held_back("AuthenticAMD", mkl=False)
    cpus.unlink()
    monkeypatch.setattr(products, "Path", lambda _: tmp_path / "nowhere")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert not is_mkl_slow.__wrapped__()
