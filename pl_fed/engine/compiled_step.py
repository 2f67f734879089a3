"""A local step that is traced and compiled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._inductor import compile as compile_graph
from torch._inductor import list_mode_options
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_flatten, tree_unflatten

from pl_fed.clients.base import Client
from pl_fed.engine.channels_last import ChannelsLast
from pl_fed.engine.products import FasterProducts, mkl_held_back
from pl_fed.engine.step import LocalStep, Tensors, cloned, tensors_of
from pl_fed.engine.tracing import CannotCompileError, trace

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
        tensors, structure = tree_flatten((cloned(state), inputs))
        tensors = [each.contiguous() for each in tensors]

        def flat(*tensors: Tensor) -> list[Tensor]:
            with ChannelsLast(), FasterProducts() if mkl_held_back() else nullcontext():
                gradients = step(*tree_unflatten(tensors, structure))
            leaves, self._gradients = tree_flatten(gradients)
            return leaves

        traced = trace(client, flat, *tensors)
        _check_draws(traced)
        options = {**(list_mode_options(mode) if mode else {}), **_WRAPPING}
        with _remembered(traced) as shown:
            self._run = compile_graph(traced, [shown(each) for each in tensors], options=options)
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
        given = [each.contiguous() for each in inputs]  # as it is compiled for
        gradients = self._run(*state, *given)
        return tree_unflatten(gradients, self._gradients)  # type: ignore[no-any-return]


def _shapes(tensors: list[Tensor]) -> list[Any]:
    return [(each.dtype, each.shape) for each in tensors]


def _check_draws(traced: GraphModule) -> None:
    """Refuse draws from torch's own generators: compiled ones are others than eager ones."""
    for node in traced.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and _draws(node):
            raise CannotCompileError(f"it draws from torch's own generator ({node.target})")


def _draws(node: Node) -> bool:
    """Return whether an operation that may draw does so: an attention without dropout does not."""
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", given) != 0)
    return True


@contextmanager
def _remembered(traced: GraphModule) -> Iterator[Callable[[Tensor], Tensor]]:
    """Let the compiler find what it made of the same graph before, in this process or another.

    It looks for graphs that come with an environment of shapes, as those of ``torch.compile`` do.
    The shapes here are fixed, and the environment stays empty: that takes showing the compiler no
    tensors, but stand-ins for them, which are made by the function that is yielded.
    """
    nodes = [node for node in traced.graph.nodes if node.op == "get_attr"]
    constants = [attrgetter(node.target)(traced) for node in nodes]
    if sum(each.numel() for each in constants if isinstance(each, Tensor)) > _LARGE:
        yield lambda tensor: tensor
        return
    fixed = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    with tracing(TracingContext(fixed)):
        yield partial(fixed.from_tensor, static_shapes=True)
