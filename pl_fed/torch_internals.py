"""torch's internals that pl_fed uses; no other file names them.

A release of torch may move internals, so ``pyproject.toml`` sets an upper bound for torch. Each
internal is imported on its first use, because only compiled steps need the compiler. If an internal
is missing, pl_fed raises :class:`MovedInTorchError`, or warns once and works without the internal.
"""

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule


class MovedInTorchError(RuntimeError):
    """A release of torch has moved something internal that pl_fed uses."""


@contextmanager
def _internals() -> Iterator[None]:
    """Turn the error of a moved internal into one that names the release of torch.

    Raises:
        MovedInTorchError: If a name, an attribute or an argument is missing.
    """
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise MovedInTorchError(
            f"torch {torch.__version__} has moved internals that pl_fed uses"
            f" ({reason.rstrip('.')}): install a release that pl_fed's pyproject.toml allows"
        ) from error


# The compiler


def compile_graph(
    graph: GraphModule,
    tensors: Sequence[Tensor],
    mode: str | None,
    options: Mapping[str, Any],
    rewrite: Callable[[Graph], None],
    remember: bool,
) -> Callable[..., list[Tensor]]:
    """Compile a graph with the compiler behind ``torch.compile``, without guards.

    ``torch.compile`` of the graph with a filter that skips all guards gives equally fast steps, but
    reads the graph by Dynamo first: 5.1 instead of 3.0 s of processor time before the first round
    of Ditto with an MLP, with a warm cache (425 operators, torch 2.14).

    Args:
        graph: The graph to compile.
        tensors: Inputs of the graph, with the shapes to compile for.
        mode: ``mode`` of ``torch.compile``.
        options: Options of the compiler, besides those of the mode.
        rewrite: A function that changes the compiler's own graph of operators, in place. It is in
            a file of its own: the compiler compiles anew when that file changes.
        remember: Whether the compiler reuses its result for the same graph, from this process or
            another.

    Raises:
        MovedInTorchError: If torch has moved or changed the compiler.
    """
    with _internals():
        from torch._inductor import compile as compile_by_inductor
        from torch._inductor import list_mode_options

        options = {
            **(list_mode_options(mode) if mode else {}),
            **options,
            "post_grad_custom_post_pass": _make_pass(rewrite),
        }
        if options.get(_GRAPHS):
            return _compile_with_graphs(graph, options)
        inspect.signature(compile_by_inductor).bind(graph, list(tensors), options=options)
    examples: list[Any] = list(tensors)
    context: AbstractContextManager[Any] = nullcontext()
    if remember:
        examples, context = _stand_ins(tensors)
    with context, _record_kernels() as kernels:
        compiled: Callable[..., list[Tensor]] = compile_by_inductor(
            graph, examples, options=options
        )
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    casts = torch.is_autocast_enabled("cpu")  # which the wrapper turns off
    return _unwrap(compiled, kernels) if on_cpu and not casts else compiled


@contextmanager
def _record_kernels() -> Iterator[list[Any]]:
    """Yield a list of the compiler's results: functions of a list of tensors, below autograd's."""
    kernels: list[Any] = []
    try:
        from torch._inductor.output_code import CompiledFxGraph

        kind: Any = CompiledFxGraph
        finish = kind.post_compile
    except (ImportError, AttributeError):  # moved: the graph keeps its wrapper
        yield kernels
        return

    def finish_and_record(graph: Any, *args: Any, **kwargs: Any) -> None:
        finish(graph, *args, **kwargs)
        kernels.append(graph)

    kind.post_compile = finish_and_record
    try:
        yield kernels
    finally:
        kind.post_compile = finish


def _unwrap(
    compiled: Callable[..., list[Tensor]], kernels: Sequence[Any]
) -> Callable[..., list[Tensor]]:
    """Return a compiled graph without autograd's wrapper.

    The wrapper restores aliases and gradients of results. A graph that only writes into its inputs
    has no results, and for a small step the wrapper is a fifth of the time: 51 instead of 40 µs for
    logistic regression of 784 pixels. Graphs with results, and those of a release that has moved
    the compiler's results, stay as they are.
    """
    if len(kernels) != 1 or getattr(kernels[0], "output_strides", None) != []:
        return compiled
    kernel = getattr(kernels[0], "current_callable", None)
    if not callable(kernel):
        return compiled
    return lambda *tensors: kernel([*tensors])


def _make_pass(rewrite: Callable[[Graph], None]) -> Any:
    """Return a function that changes a graph as a pass of the compiler."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Pass(CustomGraphPass):
        """Runs the function; its file identifies results in the compiler's cache."""

        def __call__(self, graph: Graph) -> None:
            rewrite(graph)

        def uuid(self) -> bytes:
            return get_hash_for_files((inspect.getfile(rewrite),))

    return Pass()


_GRAPHS = "triton.cudagraphs"


def uses_cuda_graphs(mode: str | None) -> bool:
    """Return whether a mode of ``torch.compile`` asks for CUDA graphs."""
    with _internals():
        from torch._inductor import list_mode_options

        return bool(mode and list_mode_options(mode).get(_GRAPHS))


def mark_static(tensors: Sequence[Tensor]) -> None:
    """Promise the compiler that these inputs stay the same memory in all calls.

    A CUDA graph may change an input in place only if that is so.
    """
    with _internals():
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)


def _compile_with_graphs(graph: GraphModule, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a graph that compiles at its first call, by ``torch.compile``.

    The compiler reads the marks of :func:`mark_static` at that call only.
    """
    unguarded = {"guard_filter_fn": lambda guards: [False] * len(guards), **options}
    compiled: Callable[..., Any] = torch.compile(
        graph, fullgraph=True, dynamic=False, options=unguarded
    )
    return compiled


def unwrap_module(module: Any) -> Any:
    """Return the module that ``torch.compile`` has wrapped, or ``None`` if it has not."""
    children = vars(module).get("_modules")
    return children.get("_orig_mod") if isinstance(children, dict) else None  # none in TorchScript


def unwrap_method(value: Any) -> Any:
    """Return the function that ``torch.compile`` has wrapped, or ``None`` if it has not."""
    function = getattr(value, "_torchdynamo_orig_callable", None) if callable(value) else None
    code = getattr(function, "__code__", None)
    if code is not None and "_dynamo" in code.co_filename:  # around a function of torch itself
        return getattr(function, "__wrapped__", function)
    return function


def _stand_ins(tensors: Sequence[Tensor]) -> tuple[list[Any], AbstractContextManager[Any]]:
    """Return stand-ins for tensors, and a context that lets the compiler reuse its results.

    The compiler reuses results only of graphs with an environment of shapes, such as those of
    ``torch.compile``. Here all shapes are fixed, and the environment is empty. This requires
    stand-ins for the tensors, with static shapes.
    """
    with _internals():
        from torch._guards import TracingContext, tracing
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        fixed = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
        stand_ins = [fixed.from_tensor(tensor, static_shapes=True) for tensor in tensors]
        return stand_ins, tracing(TracingContext(fixed))


def trace_graph(function: Callable[..., Any], *tensors: Any) -> GraphModule:
    """Return a function of tensors as a graph of operators.

    The tracer notes the shape of every result with a ``FakeTensorMode``. It builds a new mode for
    every operator, half the time of a trace, unless a tracing context holds one.

    Raises:
        MovedInTorchError: If torch has moved its tracer.
    """
    with _internals():
        from torch._guards import TracingContext, tracing
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx

        traced = make_fx(function)
        context = tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True)))
    with context:
        graph: GraphModule = traced(*tensors)
    return graph


# Operators


class OperatorMode(ABC):
    """Operator mode: a context that runs every operator of torch, below autograd, by :meth:`run`.

    Raises:
        MovedInTorchError: On entry, if torch has moved its dispatch modes.
    """

    def __enter__(self) -> Self:
        self._mode = _dispatch_mode()(self.run)
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)

    @abstractmethod
    def run(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator, or a replacement, and return its result."""


@cache
def _dispatch_mode() -> Callable[[Callable[..., Any]], Any]:
    with _internals():
        from torch.utils._python_dispatch import TorchDispatchMode

        class Mode(TorchDispatchMode):
            """Passes every operator to a function."""

            def __init__(self, run: Callable[..., Any]) -> None:
                super().__init__()
                self.run = run

            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                return self.run(func, args, kwargs or {})

    return Mode


@cache
def has_operator_modes() -> bool:
    """Return whether torch has operator modes; if not, warn that evaluations are slower."""
    try:
        _dispatch_mode()
        signature_of(torch.ops.aten.t.default)
    except MovedInTorchError as error:
        warnings.warn(f"Evaluations use torch's own kernels, as {error}.", stacklevel=2)
        return False
    return True


def arguments_of(operator: Any) -> list[Any]:
    """Return the arguments of an operator, with ``name`` and ``default_value`` each."""
    with _internals():
        arguments: list[Any] = operator._schema.arguments
    return arguments


def signature_of(operator: Any) -> str:
    """Return an operator's arguments and results as text, without its name.

    Example:
        >>> signature_of(torch.ops.aten.t.default)
        '(Tensor(a) self) -> Tensor(a)'
    """
    with _internals():
        schema = operator._schema
    return f"({str(schema).split('(', 1)[1]}"


def takes_number_out(operator: Any) -> bool:
    """Return whether an operator converts a tensor into a Python number, as ``item`` does."""
    with _internals():
        return bool(operator is torch.ops.aten._local_scalar_dense.default)


def writes_in_place(operator: Any) -> bool:
    """Return whether an operator writes into one of its arguments; other functions do not.

    Example:
        >>> writes_in_place(torch.ops.aten.add_.Tensor), writes_in_place(torch.ops.aten.add.Tensor)
        (True, False)
    """
    return bool(getattr(getattr(operator, "_schema", None), "is_mutable", False))


@cache
def onednn_product() -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    """Return oneDNN's product of a matrix and a transposed matrix; ``None`` without oneDNN."""
    try:
        linear = torch.ops.mkldnn._linear_pointwise
    except AttributeError:  # torch without oneDNN, or moved
        return None

    def product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = linear(a, b, bias, "none", [], "")
        return result

    return product


# Autograd


def is_in_backward() -> bool:
    """Return whether autograd runs a backward pass.

    Warns:
        UserWarning: Once, if torch has moved this information.
    """
    task = _backward_task()
    return task is not None and task() != -1


@cache
def _backward_task() -> Callable[[], int] | None:
    try:
        with _internals():
            task: Callable[[], int] = torch._C._current_graph_task_id
    except MovedInTorchError as error:
        warnings.warn(
            "Gradients of a net with dropout under activation checkpointing may be wrong, as"
            f" {error}.",
            stacklevel=3,
        )
        return None
    return task
