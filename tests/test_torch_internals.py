"""torch's internals that pl_fed uses: available, or reported missing in one sentence."""

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from exhaustive import exhaustive_but
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
def clear_caches():
    """Look torch's internals up again, within the test and after it."""
    for function in CACHED:
        function.cache_clear()
    yield
    for function in CACHED:
        function.cache_clear()


def hide_module(name):
    """Return a function that hides a module of torch, as if a release had moved it."""
    return lambda monkeypatch: monkeypatch.setitem(sys.modules, name, None)


def delete_name(module, name):
    """Return a function that deletes a name from a module of torch."""

    def hide(monkeypatch):
        monkeypatch.delattr(f"{module}.{name}")

    return hide


def change_compiler_arguments(monkeypatch):
    """Rename the arguments of the compiler."""
    import torch._inductor

    monkeypatch.setattr(torch._inductor, "compile", lambda graph, *, inputs: graph)


RELEASES = {
    "the compiler": hide_module("torch._inductor"),
    "the compiler's function": delete_name("torch._inductor", "compile"),
    "the compiler's arguments": change_compiler_arguments,
    "the tracing context": delete_name("torch._guards", "tracing"),
    "stand-ins for tensors": delete_name("torch._subclasses", "FakeTensorMode"),
    "the tracer": hide_module("torch.fx.experimental.proxy_tensor"),
    "the modes": hide_module("torch.utils._python_dispatch"),
}


@exhaustive_but(
    *("the compiler-stacked_compiled", "the compiler's *-one_by_one_compiled", "the modes-*"),
    *("the tracing context-one_by_one_compiled", "stand-ins *-one_by_one_compiled"),
    "the tracer-stacked_compiled",
)
@pytest.mark.slow
@pytest.mark.parametrize("engine", COMPILED)
@pytest.mark.parametrize("release", RELEASES)
def test_compiled_engine_runs_eagerly_if_torch_has_moved_its_internals(
    monkeypatch, clear_caches, engine, release
):
    client, data = FedAvg(seeded(mlp), optimizer=sgd(0.1)), shared_out(classes([8, 8]))
    expected = run_rounds(client, data, rounds=3, engine=engine.removesuffix("_compiled"))
    RELEASES[release](monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = run_rounds(client, data, rounds=3, engine=engine)
    messages = [str(warning.message) for warning in caught]
    (sentence,) = [message for message in messages if "Local steps run eagerly" in message]
    assert MOVED in sentence
    assert outcome.distance(expected) == 0


@pytest.mark.slow
@pytest.mark.parametrize("has_results", [False, True])
def test_a_graph_without_results_runs_without_autograds_wrapper(has_results):
    """As a step of SGD has none."""
    x, y = torch.ones(3), torch.ones(3)

    def step(x, y):
        x.add_(y)
        return [2 * x] if has_results else []

    graph = torch_internals.trace_graph(step, x.clone(), y)
    compiled = torch_internals.compile_graph(graph, [x, y], None, {}, lambda graph: None, False)
    assert (compiled.__module__ == torch_internals.__name__) is not has_results
    assert [result.tolist() for result in compiled(x, y)] == [[4.0] * 3] * has_results
    assert x.tolist() == [2.0] * 3


@pytest.mark.parametrize(
    "kernels",
    [
        [],
        [None, None],
        [SimpleNamespace()],
        [SimpleNamespace(output_strides=[])],
        [SimpleNamespace(output_strides=[()])],
    ],
)
def test_a_release_that_has_moved_the_compilers_results_keeps_the_wrapper(kernels):
    compiled = SimpleNamespace()
    assert torch_internals._unwrap(compiled, kernels) is compiled


def test_release_without_operator_modes_evaluates_by_its_own_kernels(monkeypatch, clear_caches):
    RELEASES["the modes"](monkeypatch)
    with pytest.warns(UserWarning, match="Evaluations use torch's own kernels") as caught:
        answers = [has_operator_modes() for _ in range(2)]
    assert (answers, len(caught)) == ([False, False], 1)
    assert MOVED in str(caught[0].message)


def test_release_that_hides_the_backward_pass_is_reported_once(monkeypatch, clear_caches):
    monkeypatch.delattr("torch._C._current_graph_task_id")
    with pytest.warns(UserWarning, match="activation checkpointing may be wrong") as caught:
        answers = [is_in_backward() for _ in range(2)]
    assert (answers, len(caught)) == ([False, False], 1)
    assert MOVED in str(caught[0].message)


def test_release_without_oneDNN_has_no_product_by_oneDNN(monkeypatch, clear_caches):  # noqa: N802
    class Operators:
        """No operator at all."""

    monkeypatch.setattr(torch.ops, "mkldnn", Operators())
    assert onednn_product() is None


def test_backward_pass_is_detected():
    answers = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: answers.append(is_in_backward()))
    assert not is_in_backward()
    (2 * x).sum().backward()
    assert answers == [True]


class Doubled(OperatorMode):
    """Doubles every sum."""

    def run(self, operator, args, kwargs):
        result = operator(*args, **kwargs)
        return result * 2 if operator is torch.ops.aten.add.Tensor else result


def test_operators_are_replaced_within_a_mode_only():
    x = torch.ones(2)
    with Doubled():
        assert (x + x).tolist() == [4, 4]
    assert (x + x).tolist() == [2, 2]


def test_arguments_of_operators_are_readable():
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert "dropout_p" in [argument.name for argument in arguments_of(attention)]
    assert signature_of(torch.ops.aten.relu.default) == "(Tensor self) -> Tensor"
    with pytest.raises(MovedInTorchError, match="_schema"):
        arguments_of(nn.Linear)


def test_operator_that_takes_a_number_out_of_a_tensor_is_detected():
    answers = []

    class Recording(OperatorMode):
        def run(self, operator, args, kwargs):
            answers.append(takes_number_out(operator))
            return operator(*args, **kwargs)

    with Recording():
        (torch.ones(1) + 1).item()
    assert answers == [False, False, True]


def test_torch_and_torchvision_are_bounded_above():
    requirements = (Path(pl_fed.__file__).parents[1] / "pyproject.toml").read_text()
    for package in ("torch", "torchvision"):
        (line,) = [line for line in requirements.splitlines() if f'"{package}>' in line]
        assert ",<" in line
