"""What pl_fed uses of torch's internals: found, or missed in one sentence."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from small_federations import classes, mlp, run_rounds, seeded, sgd, shared_out
from torch import nn

import pl_fed
from pl_fed import torch_internals
from pl_fed.clients import FedAvg
from pl_fed.engine.choice import COMPILED
from pl_fed.torch_internals import (
    MovedInTorchError,
    OperatorMode,
    arguments_of,
    has_operator_modes,
    is_in_backward,
    onednn_product,
    signature_of,
    takes_number_out,
)

MOVED = f"torch {torch.__version__} has moved internals that pl_fed uses"
CACHED = (
    torch_internals._dispatch_mode,
    torch_internals._backward_task,
    has_operator_modes,
    onednn_product,
)


@pytest.fixture
def forgotten():
    """Look torch's internals up anew, within the test and after it."""
    for function in CACHED:
        function.cache_clear()
    yield
    for function in CACHED:
        function.cache_clear()


def without_module(name):
    """Return what hides a module of torch, as if a release had moved it."""
    return lambda monkeypatch: monkeypatch.setitem(sys.modules, name, None)


def without_name(module, name):
    """Return what takes a name out of a module of torch."""

    def hide(monkeypatch):
        monkeypatch.delattr(f"{module}.{name}")

    return hide


def with_other_arguments(monkeypatch):
    """Give the compiler other arguments."""
    import torch._inductor

    monkeypatch.setattr(torch._inductor, "compile", lambda graph, *, inputs: graph)


RELEASES = {
    "the compiler": without_module("torch._inductor"),
    "the compiler's function": without_name("torch._inductor", "compile"),
    "the compiler's arguments": with_other_arguments,
    "the tracing context": without_name("torch._guards", "tracing"),
    "stand-ins for tensors": without_name("torch._subclasses", "FakeTensorMode"),
    "the tracer": without_module("torch.fx.experimental.proxy_tensor"),
    "the modes": without_module("torch.utils._python_dispatch"),
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", COMPILED)
@pytest.mark.parametrize("release", RELEASES)
def test_an_engine_that_torch_no_longer_compiles_runs_eagerly(
    monkeypatch, forgotten, engine, release
):
    client, data = FedAvg(seeded(mlp), optimizer=sgd(0.1)), shared_out(classes([8, 8]))
    expected = run_rounds(client, data, rounds=3, engine=engine.removesuffix("_compiled"))
    RELEASES[release](monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = run_rounds(client, data, rounds=3, engine=engine)
    sentences = [str(warning.message) for warning in caught]
    (sentence,) = [each for each in sentences if "Local steps run eagerly" in each]
    assert MOVED in sentence
    assert outcome.distance(expected) == 0


def test_a_release_without_modes_evaluates_by_its_own_kernels(monkeypatch, forgotten):
    RELEASES["the modes"](monkeypatch)
    with pytest.warns(UserWarning, match="Evaluations use torch's own kernels") as caught:
        answers = [has_operator_modes() for _ in range(2)]
    assert (answers, len(caught)) == ([False, False], 1)
    assert MOVED in str(caught[0].message)


def test_a_release_that_does_not_tell_a_backward_pass(monkeypatch, forgotten):
    monkeypatch.delattr("torch._C._current_graph_task_id")
    with pytest.warns(UserWarning, match="activation checkpointing may be wrong") as caught:
        answers = [is_in_backward() for _ in range(2)]
    assert (answers, len(caught)) == ([False, False], 1)
    assert MOVED in str(caught[0].message)


def test_without_oneDNN_there_is_no_product_by_it(monkeypatch, forgotten):  # noqa: N802
    class Operators:
        """No operator at all."""

    monkeypatch.setattr(torch.ops, "mkldnn", Operators())
    assert onednn_product() is None


def test_a_backward_pass_is_noticed():
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(is_in_backward()))
    assert not is_in_backward()
    (2 * x).sum().backward()
    assert seen == [True]


class Doubled(OperatorMode):
    """Doubles what is added."""

    def run(self, operator, args, kwargs):
        result = operator(*args, **kwargs)
        return result * 2 if operator is torch.ops.aten.add.Tensor else result


def test_operators_are_exchanged_within_a_mode_only():
    x = torch.ones(2)
    with Doubled():
        assert (x + x).tolist() == [4, 4]
    assert (x + x).tolist() == [2, 2]


def test_operators_tell_their_arguments():
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert "dropout_p" in [argument.name for argument in arguments_of(attention)]
    assert signature_of(torch.ops.aten.relu.default) == "(Tensor self) -> Tensor"
    with pytest.raises(MovedInTorchError, match="_schema"):
        arguments_of(nn.Linear)


def test_numbers_that_are_taken_out_are_noticed():
    noticed = []

    class Noticing(OperatorMode):
        def run(self, operator, args, kwargs):
            noticed.append(takes_number_out(operator))
            return operator(*args, **kwargs)

    with Noticing():
        (torch.ones(1) + 1).item()
    assert noticed == [False, False, True]


EAGER_FIT = """
import builtins, sys, tempfile
original, imported = builtins.__import__, []
def watch(name, globals=None, *rest):
    if (globals or {}).get("__name__", "").startswith("pl_fed"):
        imported.append(name)
    return original(name, globals, *rest)
builtins.__import__ = watch
import pl_fed
assert "torch._inductor" not in sys.modules, "by the import of pl_fed"
from pl_fed import clients, data, models, partitioners, samplers
trainer = pl_fed.Trainer(
    pl_fed.Federation(samplers.Uniform(2), engine=pl_fed.EngineOptions("stacked")),
    max_epochs=1, accelerator="cpu",
    default_root_dir=tempfile.mkdtemp(), enable_progress_bar=False, enable_model_summary=False)
digits = data.FederatedData(data.Digits(), partitioners.Shards(2), num_clients=5)
trainer.fit(clients.FedAvg(models.MLP(64, [8], 10)), digits)
assert "pl_fed.engine.compiled" not in sys.modules, "by an eager engine"
print([name for name in imported if name.startswith(("torch._inductor", "torch._dynamo"))])
"""


@pytest.mark.slow
def test_an_eager_fit_does_not_import_the_compiler():
    """Torch's optimizers import it by themselves, and so it is asked who does."""
    command = [sys.executable, "-W", "ignore", "-c", EAGER_FIT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("[]"), done.stdout[-2000:]


def test_torch_and_torchvision_are_bounded_above():
    requirements = (Path(pl_fed.__file__).parents[1] / "pyproject.toml").read_text()
    for package in ("torch", "torchvision"):
        (line,) = [each for each in requirements.splitlines() if f'"{package}>' in each]
        assert ",<" in line
