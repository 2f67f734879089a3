"""A local step that is traced and compiled. Imported when a compiled engine is asked for."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pl_fed.engine.base import CannotCompileError
from pl_fed.engine.channels_last import ChannelsLast
from pl_fed.engine.products import FasterProducts, mkl_held_back
from pl_fed.engine.step import LocalStep, Tensors
from pl_fed.engine.tracing import trace
from pl_fed.torch_internals import arguments_of, compile_graph
from pl_fed.trees import clone, leaves, replace_leaves, tree_map

_WRAPPING = {"cpp.enable_floating_point_contract_flag": "off -fwrapv"}
"""Tells the C++ compiler that integers wrap around, as those of keyed draws do: with torch 2.9 the
last few of a layer's draws were others. It is the option that becomes a flag as it is written."""
_LARGE = 1 << 17  # numbers in constants, of which each would be looked at to find a graph again
_TOLERANCE = {True: 5e-2, False: 1e-3}  # relative, in mixed precision and without


class CompiledStep:
    """A :class:`LocalStep` that is traced, and compiled for tensors of certain shapes.

    The graph goes to the compiler behind ``torch.compile`` directly: the guards, which look at each
    tensor before each step, would take a quarter of the time of a small one.

    Args:
        step: The step.
        state: The state that the step changes: see :class:`LocalStep`.
        inputs: Inputs of the shapes that it is compiled for.
        mode: ``mode`` of ``torch.compile``.

    Raises:
        CannotCompileError: If it draws from torch's own generators, if it gives other numbers than
            the eager step, or for :func:`trace`'s reasons.
    """

    def __init__(
        self,
        step: LocalStep,
        state: dict[str, Any],
        inputs: dict[str, Any],
        mode: str | None,
    ) -> None:
        eager, compiled = clone(state), clone(state)
        # other numbers show constants that were traced
        others = {**inputs, "inputs": tree_map(_scale, inputs["inputs"])}
        eager["gradients"] = step(eager, others)
        with _without_logs():
            self._compile(step, state, inputs, mode)
            self._state = leaves(compiled)
            compiled["gradients"] = self(leaves(others))
        for a, b in zip(leaves(eager), leaves(compiled), strict=True):
            if not _are_close(a, b, _TOLERANCE[step.casts]):
                raise CannotCompileError("a compiled step gave other numbers than an eager one")
        self._state = leaves(state)

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
            with ChannelsLast(), FasterProducts() if mkl_held_back() else nullcontext():
                gradients = step(**replace_leaves(example, iter(tensors)))
            self._names = {model: list(group) for model, group in gradients.items()}
            return leaves(gradients)

        with step.compiling(state, inputs):
            graph = trace(step.client, flat_step, *tensors)
        _check_draws(graph)
        remember = _count_constants(graph) <= _LARGE
        self._run = compile_graph(graph, tensors, mode, _WRAPPING, remember)
        self._shapes = _shapes(leaves(inputs))

    def takes(self, inputs: list[Tensor]) -> bool:
        """Return whether inputs are of the shapes and dtypes that it is compiled for."""
        return _shapes(inputs) == self._shapes

    def __call__(self, inputs: list[Tensor]) -> Tensors:
        """Take a step, and return the gradients that an external optimizer has to follow.

        Args:
            inputs: The tensors of the inputs, in their order.
        """
        laid_out = [tensor.contiguous() for tensor in inputs]  # as it is compiled for
        gradients = iter(self._run(*self._state, *laid_out))
        return {model: dict(zip(names, gradients)) for model, names in self._names.items()}


@contextmanager
def _without_logs() -> Iterator[None]:
    """Keep the compiler's pages of logs back: pl_fed reports a failure in one sentence."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _scale(numbers: Tensor) -> Tensor:
    """Return other numbers of the same kind."""
    return 0.75 * numbers if numbers.is_floating_point() else numbers


def _are_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    a, b = a.double(), b.double()
    scale = float(a.abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=tolerance * scale + 1e-6, equal_nan=True)


def _shapes(tensors: list[Tensor]) -> list[Any]:
    return [(tensor.dtype, tensor.shape) for tensor in tensors]


def _check_draws(graph: GraphModule) -> None:
    """Refuse draws from torch's own generators: compiled ones are others than eager ones."""
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and _draws(node):
            raise CannotCompileError(f"it draws from torch's own generator ({node.target})")


def _draws(node: Node) -> bool:
    """Return whether an operation that may draw does so: an attention without dropout does not."""
    for position, argument in enumerate(arguments_of(node.target)):
        if argument.name == "dropout_p":
            default = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", default) != 0)
    return True


def _count_constants(graph: GraphModule) -> int:
    """Return how many numbers a graph holds as constants."""
    nodes = [node for node in graph.graph.nodes if node.op == "get_attr"]
    constants = [attrgetter(node.target)(graph) for node in nodes]
    return sum(constant.numel() for constant in constants if isinstance(constant, Tensor))
