"""A local step that is traced and compiled."""

from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pl_fed.clients.base import Client
from pl_fed.engine.channels_last import ChannelsLast
from pl_fed.engine.products import FasterProducts, mkl_held_back
from pl_fed.engine.step import LocalStep, Tensors, cloned, tensors_of, with_tensors
from pl_fed.engine.tracing import CannotCompileError, trace
from pl_fed.torch_internals import arguments_of, compile_graph

_WRAPPING = {"cpp.enable_floating_point_contract_flag": "off -fwrapv"}
"""Tells the C++ compiler that integers wrap around, as those of keyed draws do: with torch 2.9 the
last few of a layer's draws were others. It is the option that becomes a flag as it is written."""
_LARGE = 1 << 17  # numbers in constants, of which each would be looked at to find a graph again


class CompiledStep:
    """A :class:`LocalStep` that is traced, and compiled for tensors of certain shapes.

    The graph goes to the compiler behind ``torch.compile`` directly: the guards, which look at each
    tensor before each step, would take a quarter of the time of a small one.

    Args:
        client: The algorithm.
        step: Its step.
        state: What the step changes; only its shapes count, and those of the inputs.
        inputs: See :class:`LocalStep`.
        mode: ``mode`` of ``torch.compile``.

    Raises:
        CannotCompileError: If it draws from torch's own generators, or for :func:`trace`'s reasons.
    """

    def __init__(
        self,
        client: Client,
        step: LocalStep,
        state: dict[str, Any],
        inputs: dict[str, Any],
        mode: str | None,
    ) -> None:
        example = {"state": cloned(state), "inputs": inputs}
        tensors = [tensor.contiguous() for tensor in tensors_of(example)]

        def flat(*tensors: Tensor) -> list[Tensor]:
            with ChannelsLast(), FasterProducts() if mkl_held_back() else nullcontext():
                gradients = step(**with_tensors(example, iter(tensors)))
            self._names = {model: list(group) for model, group in gradients.items()}
            return tensors_of(gradients)

        traced = trace(client, flat, *tensors)
        _check_draws(traced)
        remember = _constants(traced) <= _LARGE
        self._run = compile_graph(traced, tensors, mode, _WRAPPING, remember)
        self._shapes = _shapes(tensors_of(inputs))

    def takes(self, inputs: list[Tensor]) -> bool:
        """Return whether inputs are of the shapes and dtypes that it is compiled for."""
        return _shapes(inputs) == self._shapes

    def __call__(self, state: list[Tensor], inputs: list[Tensor]) -> Tensors:
        """Take a step.

        Args:
            state: The tensors of what the step changes, in their order.
            inputs: Those of the inputs.
        """
        laid_out = [tensor.contiguous() for tensor in inputs]  # as it is compiled for
        gradients = iter(self._run(*state, *laid_out))
        return {model: dict(zip(names, gradients)) for model, names in self._names.items()}


def _shapes(tensors: list[Tensor]) -> list[Any]:
    return [(each.dtype, each.shape) for each in tensors]


def _check_draws(traced: GraphModule) -> None:
    """Refuse draws from torch's own generators: compiled ones are others than eager ones."""
    for node in traced.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and _draws(node):
            raise CannotCompileError(f"it draws from torch's own generator ({node.target})")


def _draws(node: Node) -> bool:
    """Return whether an operation that may draw does so: an attention without dropout does not."""
    for position, argument in enumerate(arguments_of(node.target)):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", given) != 0)
    return True


def _constants(traced: GraphModule) -> int:
    """Return how many numbers a graph holds as constants."""
    nodes = [node for node in traced.graph.nodes if node.op == "get_attr"]
    constants = [attrgetter(node.target)(traced) for node in nodes]
    return sum(constant.numel() for constant in constants if isinstance(constant, Tensor))
