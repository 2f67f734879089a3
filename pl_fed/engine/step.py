"""One local step as a function of tensors: gradient, clipping and update, compiled together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.contract import Objective
from pl_fed.devices import to_device
from pl_fed.engine.base import CannotStackError, Clipping, LocalSettings, are_close, expand_to
from pl_fed.engine.step_function import StepFunction
from pl_fed.engine.tracing import loosen_views, trace
from pl_fed.nets.calls import reads_own_weights
from pl_fed.trees import clone, read_versions, select

Tensors = dict[str, dict[str, Tensor]]
"""Tensors by model and name, for each trained model."""

OPTIONS = ("lr", "momentum", "dampening", "weight_decay")
"""Numbers of ``torch.optim.SGD`` that may change from round to round."""


class LocalStep:
    """Local step: a step of one client or of a stack of clients, with SGD's update.

    The arguments of a call are two nested dicts of tensors, the state and the inputs. For a stack,
    clients are the first dimension of the tensors. The step changes the state in place:

    - ``leaves``: the parameters.
    - ``buffers``: running statistics and counters, of one client only.
    - ``momenta``: SGD's momentum buffers, zero before the first step.
    - ``totals``: sums over the steps of the outputs of ``training_step``.

    The inputs are:

    - ``inputs``, ``targets``, ``samples`` and, optionally, ``mask``: the minibatch.
    - ``index``: the index of the step; a scalar tensor if the step is traced, otherwise an int.
    - ``draw``: the key of the layers' draws.
    - ``rows``: the rows that the objective may read.
    - ``running``: whether the client still trains each model and, last, any model, [models + 1].
    - ``options``: SGD's numbers, from :func:`read_options`.

    A stack is differentiated in one of two ways. An eager step stacks the objective, and
    differentiates the sum of all clients' losses. It calls ``training_step`` again in each step,
    with other effects if the code reads other values. In a compiled step and in mixed precision,
    the gradient of one client is traced, and its graph is stacked. It compiles to faster products;
    and ``torch.vmap`` would bypass autocast.

    Args:
        client: The algorithm.
        objective: The objective.
        updates: SGD's updates of the trained models; ``None`` leaves the update to an external
            optimizer.
        settings: Mixed precision, gradient clipping and accumulation.
        size: The number of stacked clients; ``None`` for one client without a stack.
        row_dims: For a stack: the client dimension of each row by name, 0, or ``None`` for a row
            that all clients share.
        compiled: Whether the step will be compiled: all steps must be the same then.

    Attributes:
        casts: Whether the step runs in mixed precision.
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

    def __call__(self, state: dict[str, Any], inputs: dict[str, Any]) -> Tensors:
        """Take the step, and return the gradients for an external optimizer, if there is one."""
        buffers = clone(state["buffers"])
        gradients, outputs = self.gradients({**state, "buffers": buffers}, inputs)
        if self.settings.batches_per_step == 1:  # otherwise, the sums of gradients are clipped
            gradients = clip_gradients(gradients, self.settings.clipping, self.size is not None)
        for position, model in enumerate(self.trained):
            running = inputs["running"][position]
            _replace(state["buffers"].get(model, {}), buffers.get(model, {}), running)
            if self.updates is not None:
                leaves, momenta = state["leaves"][model], state["momenta"].get(model, {})
                update, options = self.updates[position], inputs["options"][position].unbind()
                updated = {
                    name: update.apply(leaves[name], gradient, momenta.get(name), options)
                    for name, gradient in gradients[model].items()
                }
                _replace(leaves, updated, running)
        for name, total in state["totals"].items():
            total.add_(torch.where(inputs["running"][-1], outputs[name].detach(), 0))
        return gradients if self.updates is None else {}

    def gradients(
        self, state: dict[str, Any], inputs: dict[str, Any]
    ) -> tuple[Tensors, dict[str, Tensor]]:
        """Return the gradients of parameters that have one, and ``training_step``'s outputs.

        Raises:
            CannotStackError: If an eager stack changes its parameters in place.
        """
        if self.size is None:
            return self._client_gradients(*_Arguments.collect(state, inputs))
        if self.casts and self._client_graph is None:
            self._client_graph = self._trace_client(state, inputs)
        stack = self._stack(state, inputs)
        if self.compiled:
            return self._stack_gradients(stack)
        versions = read_versions(stack.leaves)
        gradients = self._stack_gradients(stack)
        if read_versions(stack.leaves) != versions:
            raise CannotStackError(
                "a step changes trained parameters in place, also those of clients that have"
                " completed their steps"
            )
        return gradients

    def _stack_gradients(self, stack: "_Arguments") -> tuple[Tensors, dict[str, Tensor]]:
        """Return the gradients and outputs of all clients of a stack."""
        if self._client_graph is not None:
            stacked = torch.vmap(self._client_graph, in_dims=tuple(self._client_dims))
            return stacked(*stack)  # type: ignore[no-any-return]
        _, _, *others = stack
        model_dim, _, *other_dims = self._client_dims
        with torch.enable_grad():  # of the sum of all clients' losses
            leaves = _require_gradients(stack.leaves)
            with self.settings.autocast(), _own_embeddings():
                outputs = torch.vmap(self.function, in_dims=(model_dim, *other_dims))(
                    leaves, *others
                )
            return _differentiate(outputs["loss"].sum(), leaves), outputs

    @contextmanager
    def trace_clients(self, state: dict[str, Any], inputs: dict[str, Any]) -> Iterator[None]:
        """Differentiate a stack by the graph of one client within the context.

        Args:
            state: The state for the trace of one client.
            inputs: The inputs for the trace of one client.
        """
        graph = self._client_graph
        if self.size is not None and graph is None:
            self._client_graph = self._trace_client(state, inputs)
        try:
            yield
        finally:
            self._client_graph = graph

    def backward_gradients(self, state: dict[str, Any], inputs: dict[str, Any]) -> Tensors:
        """Return the gradients of the only or first client as ``loss.backward()`` gives them.

        They differ from :meth:`gradients` if the step calls ``backward`` itself, as a re-entrant
        activation checkpoint does.
        """
        if self.size is not None:
            arguments = self._collect_first(state, inputs)
        else:
            arguments = _Arguments.collect(state, inputs)
        return self._client_gradients(*arguments, accumulates=True)[0]

    def reads_own_weights(self, state: dict[str, Any], inputs: dict[str, Any]) -> bool:
        """Return whether the step reads the weights of the modules: see `reads_own_weights`."""
        rows = [self.client.row(model).data for model in self.trained]
        return reads_own_weights(rows, lambda: [*self.gradients(clone(state), inputs)])

    def _stack(self, state: dict[str, Any], inputs: dict[str, Any]) -> "_Arguments":
        """Return the arguments of all clients; no client of a stack has buffers of its own."""
        return _Arguments.collect({**state, "buffers": {}}, inputs)

    @property
    def _client_dims(self) -> "_Arguments":
        """The client dimension of each argument of a stack; ``None`` if all clients share it."""
        return _Arguments(leaves=0, buffers=None, batch=0, index=None, draw=0, rows=self.row_dims)

    def _collect_first(self, state: dict[str, Any], inputs: dict[str, Any]) -> "_Arguments":
        """Return the arguments of a stack's first client."""
        return _Arguments(*map(_select_first, self._stack(state, inputs), self._client_dims))

    def _trace_client(
        self, state: dict[str, Any], inputs: dict[str, Any]
    ) -> Callable[..., tuple[Tensors, dict[str, Tensor]]]:
        """Return the gradients of one client as a graph, traced on the first client."""
        first = self._collect_first(state, inputs)
        # the tracer counts the parameters of a function, optional ones as well
        graph = trace(self.client, lambda *arguments: self._client_gradients(*arguments), *first)
        return loosen_views(graph)

    def _client_gradients(
        self,
        leaves: Tensors,
        buffers: Tensors,
        batch: dict[str, Tensor],
        index: Tensor,
        draw: Tensor,
        rows: Mapping[str, Any],
        accumulates: bool = False,
    ) -> tuple[Tensors, dict[str, Tensor]]:
        """Differentiate the objective of one client.

        ``accumulates`` chooses ``backward`` instead of ``grad``: see :meth:`backward_gradients`.
        """
        differentiate_loss = _accumulate if accumulates else _differentiate
        with torch.enable_grad():
            leaves = _require_gradients(leaves)
            tensors = {
                model: {**group, **buffers.get(model, {})} for model, group in leaves.items()
            }

            def differentiate(
                outputs: dict[str, Tensor],
            ) -> tuple[Tensors, dict[str, Tensor]]:
                """Return the gradients, while the models have these leaves."""
                full_precision = torch.autocast(self.client.device.type, enabled=False)
                with full_precision if self.casts else nullcontext():
                    gradients = differentiate_loss(outputs["loss"], leaves)
                return gradients, {name: value.detach() for name, value in outputs.items()}

            embeddings = _own_embeddings() if self.size is not None else nullcontext()
            with self.settings.autocast(), embeddings:
                return self.function(  # type: ignore[return-value]
                    tensors, batch, index, draw, rows, read=differentiate
                )


class _Arguments(NamedTuple):
    """Arguments of the gradients of one client or of a stack, or their client dimensions.

    Attributes:
        leaves: The parameters, by model and name.
        buffers: Running statistics and counters, by model and name.
        batch: The fields of the minibatch, by name.
        index: The index of the step.
        draw: The key of the layers' draws.
        rows: The rows that the objective may read, by name.
    """

    leaves: Any
    buffers: Any
    batch: Any
    index: Any
    draw: Any
    rows: Any

    @classmethod
    def collect(cls, state: Mapping[str, Any], inputs: Mapping[str, Any]) -> "_Arguments":
        """Return the arguments from the state and the inputs of a :class:`LocalStep`."""
        fields = ("inputs", "targets", "mask", "samples")
        batch = {name: inputs[name] for name in fields if name in inputs}
        return cls(
            state["leaves"],
            state["buffers"],
            batch,
            inputs["index"],
            inputs["draw"],
            inputs["rows"],
        )


def clip_gradients(gradients: Tensors, clipping: Clipping, stacked: bool) -> Tensors:
    """Return the clipped gradients of all models, each model by itself: see :class:`Clipping`."""
    if not clipping.value:
        return gradients
    return {
        model: dict(zip(group, clipping.clip([*group.values()], stacked)))
        for model, group in gradients.items()
    }


@dataclass(frozen=True)
class SgdUpdate:
    """SGD update: the step of ``torch.optim.SGD`` on one tensor.

    Attributes:
        momentum: Whether the update has momentum.
        weight_decay: Whether the update has weight decay.
        nesterov: Whether momentum is Nesterov's.
        maximize: Whether the update maximises the loss.
    """

    momentum: bool
    weight_decay: bool
    nesterov: bool
    maximize: bool

    @classmethod
    def from_group(cls, group: Mapping[str, Any]) -> "SgdUpdate":
        """Return the update of an optimizer's parameter group."""
        return cls(
            bool(group["momentum"]),
            bool(group["weight_decay"]),
            bool(group["nesterov"]),
            bool(group["maximize"]),
        )

    def apply(
        self,
        leaf: Tensor,
        gradient: Tensor,
        momentum: Tensor | None,
        options: Sequence[Tensor],
    ) -> Tensor:
        """Return the updated parameter, and update its momentum buffer in place.

        Args:
            leaf: The parameter.
            gradient: The clipped gradient of the parameter.
            momentum: The momentum buffer; ``None`` without momentum.
            options: :data:`OPTIONS` as scalars, or [clients] for a stack, with 1 − dampening (1 in
                the first step) in place of dampening.
        """
        lr, mass, gain, decay = (expand_to(number, leaf) for number in options)
        if self.maximize:
            gradient = -gradient
        if self.weight_decay:
            gradient = gradient + decay * leaf
        if momentum is not None:
            velocity = mass * momentum + gain * gradient
            momentum.copy_(velocity)
            gradient = gradient + mass * velocity if self.nesterov else velocity
        return leaf - lr * gradient


def read_updates(objective: Objective, optimizer: torch.optim.Optimizer) -> list[SgdUpdate] | None:
    """Return the updates of the trained models' groups; ``None`` for optimizers other than SGD."""
    names = [group.get("name") for group in optimizer.param_groups]
    if type(optimizer) is not torch.optim.SGD or names != list(objective.trained):
        return None
    return [SgdUpdate.from_group(group) for group in optimizer.param_groups]


_embed = torch.embedding


@contextmanager
def _own_embeddings() -> Iterator[None]:
    """Keep the embeddings of a stack within each client's own table.

    ``torch.vmap`` joins all clients' tables. Then an id beyond a table reads, and trains, a row of
    another client: its embedding is NaN here, and breaks the upload of its own client alone. And
    only the first client's padding row would be without a gradient.

    Layers and functions call ``torch.embedding`` by this name. A ``TorchFunctionMode`` would add a
    tenth to the time of a stack of small nets.
    """
    torch.embedding = _read_own_rows
    try:
        yield
    finally:
        torch.embedding = _embed


def _read_own_rows(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int | torch.SymInt = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Return embeddings as ``torch.embedding``, of ids beyond the table as NaN."""
    own_ids = indices.clamp(0, len(weight) - 1)
    vectors = _embed(weight, own_ids, padding_idx, scale_grad_by_freq, sparse)
    if padding_idx >= 0:  # -1 stands for no padding
        is_padding = indices.eq(padding_idx)[..., None]
        vectors = torch.where(is_padding, vectors.detach(), vectors)
    return torch.where((indices == own_ids)[..., None], vectors, torch.nan)


def read_options(optimizer: torch.optim.Optimizer, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return SGD's numbers of the first step and of all later steps, both [groups, 4].

    For other optimizers, return empty tensors.
    """
    if type(optimizer) is not torch.optim.SGD:
        return like.new_empty(0), like.new_empty(0)
    rows = [[group[name] for name in OPTIONS] for group in optimizer.param_groups]
    first = [[lr, momentum, 1.0, decay] for lr, momentum, _, decay in rows]
    later = [[lr, momentum, 1 - dampening, decay] for lr, momentum, dampening, decay in rows]
    numbers = torch.tensor([first, later], dtype=torch.float64)
    both = to_device(numbers, like, like.dtype)
    return both[0], both[1]


def _require_gradients(leaves: Tensors) -> Tensors:
    """Return leaves that share the memory of these, and that a loss can be differentiated by."""
    return {
        model: {name: leaf.detach().requires_grad_() for name, leaf in group.items()}
        for model, group in leaves.items()
    }


def _differentiate(loss: Tensor, leaves: Tensors) -> Tensors:
    """Return the gradients of the leaves that have one, by ``torch.autograd.grad``."""
    flat = [leaf for group in leaves.values() for leaf in group.values()]
    gradients = iter(torch.autograd.grad(loss, flat, allow_unused=True))
    return {
        model: {name: grad for name in group if (grad := next(gradients)) is not None}
        for model, group in leaves.items()
    }


def _accumulate(loss: Tensor, leaves: Tensors) -> Tensors:
    """Return the gradients of the leaves that have one, by ``loss.backward()``."""
    loss.backward()
    return {
        model: {name: leaf.grad for name, leaf in group.items() if leaf.grad is not None}
        for model, group in leaves.items()
    }


def have_same_gradients(actual: Tensors, expected: Tensors) -> bool:
    """Return whether gradients agree within rounding, where the expected ones are finite."""
    for model, group in expected.items():
        for name, gradient in {**dict.fromkeys(actual[model]), **group}.items():
            found = actual[model].get(name)
            if gradient is None:  # the parameter has no effect
                gradient = torch.zeros_like(actual[model][name])
            if found is None or not are_close(found, gradient, _TOLERANCE):
                return False
    return True


_TOLERANCE = 1e-2  # relative, of gradients


def _replace(old: Mapping[str, Tensor], new: Mapping[str, Tensor], running: Tensor) -> None:
    """Replace tensors in place, but only for running clients."""
    for name, tensor in new.items():
        old[name].copy_(torch.where(expand_to(running, old[name]), tensor, old[name]))


def _select_first(tree: Any, dim: Any) -> Any:
    """Return the first client's tensors of a stack."""
    if isinstance(tree, dict):
        return {
            name: _select_first(branch, dim[name] if isinstance(dim, dict) else dim)
            for name, branch in tree.items()
        }
    return tree if dim is None else select(tree, 0)
