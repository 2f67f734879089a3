"""One local step as a function of tensors: gradient, clipping and update, compiled together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pl_fed.clients.base import Client
from pl_fed.clients.contract import Objective
from pl_fed.engine.base import LocalSettings
from pl_fed.engine.step_function import StepFunction
from pl_fed.engine.tracing import loosen_views, trace
from pl_fed.trees import clone, select
from pl_fed.types import Batch

Tensors = dict[str, dict[str, Tensor]]
"""For each trained model, tensors by name."""

OPTIONS = ("lr", "momentum", "dampening", "weight_decay")
"""Numbers of ``torch.optim.SGD`` that may change from round to round."""


class LocalStep:
    """A step of one client or of a stack of clients, with SGD's update in it.

    It is called with two nested dicts of tensors, in which clients are the first dimension if they
    are stacked. The state is changed in place:

    - ``leaves``: the parameters;
    - ``buffers``: running statistics and counters, of one client only;
    - ``momenta``: SGD's momentum buffers, zero before the first step;
    - ``totals``: sums over the steps of the outputs of ``training_step``.

    The inputs are ``inputs``, ``targets``, ``samples`` and perhaps ``mask`` of a minibatch;
    ``index``, which step it is: a scalar tensor where the step is traced, else an int; ``draw``,
    the key of the layers' draws; ``rows``; ``running``, whether the client still trains each model,
    and, last, any of them [models + 1]; and ``options``, SGD's numbers, see :func:`options_of`.

    A stack is differentiated in one of two ways. Eagerly, the objective is stacked, and the sum of
    all clients' losses is differentiated: that calls ``training_step`` anew in each step, which may
    then do and use other things than in the step before. In a compiled step, and in mixed
    precision, the gradient of one client is traced, and its graph is stacked: that compiles to
    faster products, and ``torch.vmap`` would go past autocast.

    Args:
        client: The algorithm.
        objective: The objective.
        updates: SGD's, by trained model; ``None`` leaves the update to an external optimizer.
        settings: Mixed precision and gradient clipping.
        size: How many clients are stacked, or ``None`` for one client that is not.
        row_dims: Of stacked clients: 0 for each row that is a client's own, else ``None``.
        compiled: Whether it is to be compiled: all steps are then the same.

    Attributes:
        casts: Whether it runs in mixed precision.
        traced: Whether ``training_step`` is traced: ``index`` is a tensor then.
    """

    def __init__(
        self,
        client: Client,
        objective: Objective,
        updates: "list[SgdUpdate] | None",
        settings: LocalSettings,
        size: int | None,
        row_dims: Mapping[str, int | None],
        compiled: bool,
    ) -> None:
        self.client = client
        self.objective = objective
        self.function = StepFunction(client, objective)
        self.trained = objective.trained
        self.settings = settings
        self.size = size
        self.compiled = compiled
        self.row_dims = dict(row_dims)
        self.updates = updates
        self.casts = settings.casts(client.device)
        self.traced = compiled or self.casts
        self._client_graph: Callable[..., Any] | None = None  # the gradients of one client
        self._pads: bool | None = None  # whether an embedding has a padding index

    def __call__(self, state: dict[str, Any], inputs: dict[str, Any]) -> Tensors:
        """Take the step, and return the gradients that are still to be followed."""
        seen = clone(state["buffers"])
        gradients, outputs = self.gradients({**state, "buffers": seen}, inputs)
        gradients = {model: self._clipped(group) for model, group in gradients.items()}
        for position, model in enumerate(self.trained):
            running = inputs["running"][position]
            _replace(state["buffers"].get(model, {}), seen.get(model, {}), running)
            if self.updates is not None:
                moved = self._moved(position, gradients[model], state, inputs["options"])
                _replace(state["leaves"][model], moved, running)
        for name, total in state["totals"].items():
            total.add_(torch.where(inputs["running"][-1], outputs[name].detach(), 0))
        return gradients if self.updates is None else {}

    def _moved(
        self,
        position: int,
        gradients: dict[str, Tensor],
        state: dict[str, Any],
        options: Tensor,
    ) -> dict[str, Tensor]:
        """Return where the parameters of a model move; its momenta are changed in place."""
        model, update = self.trained[position], (self.updates or [])[position]
        leaves, momenta = state["leaves"][model], state["momenta"].get(model, {})
        numbers = options[position].unbind()
        return {
            name: update.moved(leaves[name], gradient, momenta.get(name), numbers)
            for name, gradient in gradients.items()
        }

    def gradients(
        self, state: dict[str, Any], inputs: dict[str, Any]
    ) -> tuple[Tensors, dict[str, Tensor]]:
        """Return the gradient of each parameter that has one, and ``training_step``'s outputs."""
        if self.size is None:
            others = self._objective_inputs(inputs)
            return self._client_gradients(state["leaves"], state["buffers"], *others)
        if self.casts and self._client_graph is None:
            self._client_graph = self._trace_client(state, inputs)
        stack, dims = self._stack(state, inputs)
        if self._client_graph is None:
            return self._stack_gradients(stack, dims)
        return torch.vmap(self._client_graph, in_dims=dims)(*stack)  # type: ignore[no-any-return]

    @contextmanager
    def compiling(self, state: dict[str, Any], inputs: dict[str, Any]) -> Iterator[None]:
        """Differentiate a stack by the graph of one client within the context.

        Args:
            state: The state that the client is traced on.
            inputs: The inputs that the client is traced on.
        """
        graph = self._client_graph
        if self.size is not None and graph is None:
            self._client_graph = self._trace_client(state, inputs)
        try:
            yield
        finally:
            self._client_graph = graph

    def _objective_inputs(self, inputs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the inputs of the objective: batch, index, draw and rows."""
        batch = {
            name: inputs[name]
            for name in ("inputs", "targets", "mask", "samples")
            if name in inputs
        }
        return batch, inputs["index"], inputs["draw"], inputs["rows"]

    def _stack(
        self, state: dict[str, Any], inputs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return stacked arguments of :meth:`_client_gradients`, and their client dimensions."""
        stack = (state["leaves"], {}, *self._objective_inputs(inputs))
        return stack, (0, None, 0, None, 0, self.row_dims)

    def _trace_client(
        self, state: dict[str, Any], inputs: dict[str, Any]
    ) -> Callable[..., tuple[Tensors, dict[str, Tensor]]]:
        """Return the gradients of one client as a graph, which is traced on the first client."""

        def client_gradients(*tensors: Any) -> tuple[Tensors, dict[str, Tensor]]:
            return self._client_gradients(*tensors)

        first = _first(*self._stack(state, inputs))
        return loosen_views(trace(self.client, client_gradients, *first))

    def _client_gradients(
        self,
        leaves: Tensors,
        buffers: Tensors,
        batch: dict[str, Tensor],
        index: Tensor,
        draw: Tensor,
        rows: Mapping[str, Any],
    ) -> tuple[Tensors, dict[str, Tensor]]:
        """Differentiate the objective of one client."""
        with torch.enable_grad():
            leaves = _trainable(leaves)
            tensors = {
                model: {**group, **buffers.get(model, {})} for model, group in leaves.items()
            }
            with self.settings.autocast():
                outputs = self.function(tensors, Batch(**batch), index, draw, rows)
            gradients = _differentiate(outputs["loss"], leaves)
        return gradients, {name: value.detach() for name, value in outputs.items()}

    def _stack_gradients(
        self, stack: tuple[Any, ...], dims: tuple[Any, ...]
    ) -> tuple[Tensors, dict[str, Tensor]]:
        """Stack the objective, and differentiate the sum of all clients' losses."""

        def client_outputs(
            leaves: Tensors, _: Tensors, batch: dict[str, Tensor], *others: Any
        ) -> dict[str, Tensor]:
            return self.function(leaves, Batch(**batch), *others)

        with torch.enable_grad():
            leaves = _trainable(stack[0])
            embeddings = None if self._pads is False else _PaddedEmbeddings()
            with self.settings.autocast(), embeddings or nullcontext():
                outputs = torch.vmap(client_outputs, in_dims=dims)(leaves, *stack[1:])
            self._pads = embeddings is not None and embeddings.found
            return _differentiate(outputs["loss"].sum(), leaves), outputs

    def _clipped(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        value = self.settings.clipping.value
        if not value or not gradients:
            return gradients
        if self.settings.clipping.algorithm == "value":
            return {name: gradient.clamp(-value, value) for name, gradient in gradients.items()}
        flat = [gradient.flatten(int(self.size is not None)) for gradient in gradients.values()]
        norms = [torch.linalg.vector_norm(gradient, dim=-1) for gradient in flat]
        norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        factor = (value / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        return {name: g * _beside(factor, g) for name, g in gradients.items()}


@dataclass(frozen=True)
class SgdUpdate:
    """``torch.optim.SGD``'s step on one tensor.

    Attributes:
        momentum: Whether there is momentum.
        weight_decay: Whether weights decay.
        nesterov: Whether momentum is Nesterov's.
        maximize: Whether the loss is maximised.
    """

    momentum: bool
    weight_decay: bool
    nesterov: bool
    maximize: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "SgdUpdate":
        """Read an optimizer's group."""
        return cls(
            bool(group["momentum"]),
            bool(group["weight_decay"]),
            bool(group["nesterov"]),
            bool(group["maximize"]),
        )

    def moved(
        self,
        leaf: Tensor,
        gradient: Tensor,
        momentum: Tensor | None,
        options: Sequence[Tensor],
    ) -> Tensor:
        """Return where a parameter moves; its momentum is changed in place.

        Args:
            leaf: The parameter.
            gradient: Its gradient, clipped.
            momentum: Its momentum buffer, if there is momentum.
            options: :data:`OPTIONS` as scalars, with 1 − dampening (1 in the first step) for
                dampening.
        """
        rate, mass, share, decay = options
        if self.maximize:
            gradient = -gradient
        if self.weight_decay:
            gradient = gradient + decay * leaf
        if momentum is not None:
            velocity = mass * momentum + share * gradient
            momentum.copy_(velocity)
            gradient = gradient + mass * velocity if self.nesterov else velocity
        return leaf - rate * gradient


def updates_of(objective: Objective, optimizer: torch.optim.Optimizer) -> list[SgdUpdate] | None:
    """Return the updates of the trained models' groups, or ``None`` if the optimizer is no SGD."""
    names = [group.get("name") for group in optimizer.param_groups]
    if type(optimizer) is not torch.optim.SGD or names != list(objective.trained):
        return None
    return [SgdUpdate.of(group) for group in optimizer.param_groups]


class _PaddedEmbeddings(TorchFunctionMode):
    """Keeps gradients out of the padding's row of embeddings in a stack.

    ``torch.vmap`` makes one table of all clients' tables, and leaves out the first client's row
    alone.

    Attributes:
        found: Whether an embedding has a padding index.
    """

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _EMBEDDINGS:
            return result
        arguments = {**dict(zip(_EMBEDDINGS[func], args)), **(kwargs or {})}
        padding = arguments.get("padding_idx")
        if padding is None or (padding < 0 and func is torch.embedding):
            return result
        self.found = True
        ids = arguments["indices" if func is torch.embedding else "input"]
        is_padding = ids == padding % len(arguments["weight"])
        return torch.where(is_padding[..., None], result.detach(), result)


_EMBEDDINGS = {
    nn.functional.embedding: ("input", "weight", "padding_idx"),
    torch.embedding: ("weight", "indices", "padding_idx"),
}
"""Their first arguments. A negative padding index means none to the second."""


def options_of(optimizer: torch.optim.Optimizer, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return SGD's numbers of the first step and of all others, each [groups, 4].

    Of any other optimizer there are none.
    """
    if type(optimizer) is not torch.optim.SGD:
        return like.new_empty(0), like.new_empty(0)
    rows = [[group[name] for name in OPTIONS] for group in optimizer.param_groups]
    first = [[rate, mass, 1.0, decay] for rate, mass, _, decay in rows]
    later = [[rate, mass, 1 - dampening, decay] for rate, mass, dampening, decay in rows]
    return _numbers(first, like), _numbers(later, like)


def _numbers(rows: list[list[float]], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).to(like)


def _trainable(leaves: Tensors) -> Tensors:
    return {
        model: {name: leaf.detach().requires_grad_() for name, leaf in group.items()}
        for model, group in leaves.items()
    }


def _differentiate(loss: Tensor, leaves: Tensors) -> Tensors:
    flat = [leaf for group in leaves.values() for leaf in group.values()]
    gradients = iter(torch.autograd.grad(loss, flat, allow_unused=True))
    return {
        model: {name: grad for name in group if (grad := next(gradients)) is not None}
        for model, group in leaves.items()
    }


def _replace(old: Mapping[str, Tensor], new: Mapping[str, Tensor], running: Tensor) -> None:
    """Replace tensors in place, those of clients that do not stand still."""
    for name, tensor in new.items():
        old[name].copy_(torch.where(_beside(running, old[name]), tensor, old[name]))


def _first(tree: Any, dim: Any) -> Any:
    """Return the first client's tensors of a stack."""
    if isinstance(tree, dict):
        return {
            name: _first(branch, dim[name] if isinstance(dim, dict) else dim)
            for name, branch in tree.items()
        }
    if isinstance(tree, tuple) and isinstance(dim, tuple):
        return tuple(_first(branch, branch_dim) for branch, branch_dim in zip(tree, dim))
    return tree if dim is None else select(tree, 0)


def _beside(numbers: Tensor, leaf: Tensor) -> Tensor:
    """Shape numbers [clients], or one number, to go with a leaf."""
    return numbers.view(-1, *([1] * (leaf.dim() - 1))) if numbers.dim() else numbers
