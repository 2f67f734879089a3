"""Compiled local steps. Imported on the first use of a compiled engine."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pl_fed.engine.base import CannotCompileError, are_close
from pl_fed.engine.channels_last import ChannelsLast
from pl_fed.engine.in_place import add_products_in_place
from pl_fed.engine.products import FasterProducts, is_mkl_slow
from pl_fed.engine.step import LocalStep, Tensors
from pl_fed.engine.tracing import trace
from pl_fed.torch_internals import (
    arguments_of,
    compile_graph,
    mark_static,
    uses_cuda_graphs,
)
from pl_fed.trees import clone, leaves, replace_leaves, tree_map

_WRAPPING = {"cpp.enable_floating_point_contract_flag": "off -fwrapv"}
"""Compiler flag: integers wrap around, as in keyed draws. Without it, the last few draws of a layer
were wrong with torch 2.9. This option passes its text to the C++ compiler unchanged."""
_MAX_CACHED_CONSTANTS = 1 << 17  # numbers; a lookup in the compiler's cache reads all of them
_LARGE = 1e3  # largest input of the comparison with the eager step
_TOLERANCE = {True: 5e-2, False: 1e-3}  # relative, by whether the step is in mixed precision


class CompiledStep:
    """Compiled step: a :class:`LocalStep`, traced and compiled for tensors of certain shapes.

    The graph goes directly to the compiler behind ``torch.compile``. The guards of
    ``torch.compile`` inspect each tensor before each step, and would take a quarter of the time of
    a small step.

    Args:
        step: The step.
        state: The state that the step changes: see :class:`LocalStep`.
        inputs: Example inputs; they determine the shapes.
        mode: ``mode`` of ``torch.compile``.

    Raises:
        CannotCompileError: If the step draws from torch's own generators, gives other numbers than
            the eager step, or cannot be traced (see :func:`trace`).
    """

    def __init__(
        self,
        step: LocalStep,
        state: dict[str, Any],
        inputs: dict[str, Any],
        mode: str | None,
    ) -> None:
        before = clone(state)
        # other inputs and weights than in the trace reveal numbers that became constants of the
        # graph, and code that reads the module's own weights
        eager = clone({**state, "leaves": tree_map(_scale, state["leaves"])})
        moved = leaves(clone(eager))
        test_inputs = {**inputs, "inputs": tree_map(_scale, inputs["inputs"])}
        eager["gradients"] = step(eager, test_inputs)
        with _silence_logs():
            self._compile(step, state, inputs, mode)
            self._state = leaves(state)
            if uses_cuda_graphs(mode):
                mark_static(self._state)
            try:
                for tensor, value in zip(self._state, moved, strict=True):
                    tensor.copy_(value)
                gradients = self(leaves(test_inputs))
                compiled = clone({**state, "gradients": gradients})
            finally:
                for tensor, value in zip(self._state, leaves(before), strict=True):
                    tensor.copy_(value)
        for expected, actual in zip(leaves(eager), leaves(compiled), strict=True):
            if not are_close(actual, expected, _TOLERANCE[step.casts]):
                raise CannotCompileError("a compiled step gave other numbers than an eager one")

    def _compile(
        self,
        step: LocalStep,
        state: dict[str, Any],
        inputs: dict[str, Any],
        mode: str | None,
    ) -> None:
        example = {"state": clone(state), "inputs": inputs}
        tensors = [tensor.contiguous() for tensor in leaves(example)]

        def flat_step(*tensors: Tensor) -> list[Tensor]:
            """Take the step on a flat list of tensors, and return the gradients as a list."""
            with ChannelsLast(), FasterProducts() if is_mkl_slow() else nullcontext():
                gradients = step(**replace_leaves(example, iter(tensors)))
            self._names = {model: list(group) for model, group in gradients.items()}
            return leaves(gradients)

        with step.trace_clients(state, inputs):
            graph = trace(step.client, flat_step, *tensors)
        _check_draws(graph)
        is_cached = _count_constants(graph) <= _MAX_CACHED_CONSTANTS
        self._run = compile_graph(graph, tensors, mode, _WRAPPING, add_products_in_place, is_cached)
        self._shapes = _shapes(leaves(inputs))

    def takes(self, inputs: list[Tensor]) -> bool:
        """Return whether inputs have the shapes and dtypes of the compiled step."""
        return _shapes(inputs) == self._shapes

    def __call__(self, inputs: list[Tensor]) -> Tensors:
        """Take a step, and return the gradients for an external optimizer.

        Args:
            inputs: The tensors of the inputs, in their order.
        """
        contiguous = [tensor.contiguous() for tensor in inputs]  # as in the compiled step
        gradients = iter(self._run(*self._state, *contiguous))
        return {model: dict(zip(names, gradients)) for model, names in self._names.items()}


@contextmanager
def _silence_logs() -> Iterator[None]:
    """Suppress the compiler's logs: pl_fed reports a failure in one sentence."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)


def _scale(numbers: Tensor) -> Tensor:
    """Return other floating-point numbers, of moderate size; integers and flags stay the same.

    Samples that overflow must not decide which engine the other clients have.
    """
    return 0.75 * numbers.clamp(-_LARGE, _LARGE) if numbers.is_floating_point() else numbers


def _shapes(tensors: list[Tensor]) -> list[Any]:
    return [(tensor.dtype, tensor.shape) for tensor in tensors]


def _check_draws(graph: GraphModule) -> None:
    """Refuse draws from torch's own generators: compiled and eager draws differ."""
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and _draws(node):
            raise CannotCompileError(f"it draws from torch's own generator ({node.target})")


def _draws(node: Node) -> bool:
    """Return whether an operation that may draw does draw. Attention without dropout does not."""
    for position, argument in enumerate(arguments_of(node.target)):
        if argument.name == "dropout_p":
            default = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", default) != 0)
    return True


def _count_constants(graph: GraphModule) -> int:
    """Return the number of numbers in the constants of a graph."""
    nodes = [node for node in graph.graph.nodes if node.op == "get_attr"]
    constants = [attrgetter(node.target)(graph) for node in nodes]
    return sum(constant.numel() for constant in constants if isinstance(constant, Tensor))
