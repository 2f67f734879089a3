"""One local step as a function of tensors: gradient, clipping and update, to be compiled whole."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pl_fed.clients.base import Client
from pl_fed.clients.contract import Objective
from pl_fed.engine.base import Clipping, casts
from pl_fed.engine.step_function import StepFunction
from pl_fed.engine.tracing import trace
from pl_fed.trees import select, tree_map
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
    - ``totals``: sums over the steps of what ``training_step`` gives.

    The inputs are ``inputs``, ``targets``, ``samples`` and perhaps ``mask`` of a minibatch;
    ``index``, which step it is: a scalar tensor where the step is traced, else an int; ``draw``,
    the key of the layers' draws; ``rows``; ``running``, whether the client still trains each model,
    and, last, any of them [models + 1]; and ``options``, SGD's numbers, see :func:`options_of`.

    Args:
        client: The algorithm.
        objective: What is minimised.
        updates: SGD's, by trained model; ``None`` leaves the update to an optimizer outside.
        clipping: Gradient clipping.
        autocast: Gives the context in which ``training_step`` runs.
        stacked: Whether clients are stacked.
        row_dims: Of stacked clients: 0 for each row that is a client's own, else ``None``.
        compiled: Whether it is to be compiled: all steps are then the same.
    """

    def __init__(
        self,
        client: Client,
        objective: Objective,
        updates: "list[SgdUpdate] | None",
        clipping: Clipping,
        autocast: Callable[[], AbstractContextManager[Any]],
        stacked: bool,
        row_dims: Mapping[str, int | None],
        compiled: bool = False,
    ) -> None:
        self.objective = objective
        self.function = StepFunction(client, objective)
        self.trained = objective.trained
        self.clipping = clipping
        self.autocast = autocast
        self.stacked = stacked
        self.row_dims = dict(row_dims)
        self.updates = updates
        self._one: Callable[..., Any] | None = None
        self._used: dict[str, tuple[str, ...]] = {}
        self.casts = casts(autocast, client.device)
        self.traced = compiled or self.casts
        self._within: bool | None = None  # whether to differentiate within torch.vmap only

    def __call__(self, state: dict[str, Any], inputs: dict[str, Any]) -> Tensors:
        """Take the step, and return the gradients that are still to be followed."""
        seen = cloned(state["buffers"])
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
        batch = {
            name: inputs[name]
            for name in ("inputs", "targets", "mask", "samples")
            if name in inputs
        }
        rest: tuple[Any, ...] = (batch, inputs["index"], inputs["draw"], inputs["rows"])
        if not self.stacked:
            return self._of_one(state["leaves"], state["buffers"], *rest)
        tensors, dims = (state["leaves"], *rest), (0, 0, None, 0, self.row_dims)
        if not self.traced and not self._within:
            with nullcontext() if self._within is False else _PaddedEmbeddings() as embeddings:
                found = self._of_all(tensors, dims)
            self._within = bool(embeddings and embeddings.found)
            if not self._within:
                return found
        if self._one is None:
            self._one = self._one_for_many(*_first(tensors, dims))
        return torch.vmap(self._one, in_dims=dims)(*tensors)  # type: ignore[no-any-return]

    def _of_one(
        self,
        leaves: Tensors,
        buffers: Tensors,
        batch: dict[str, Tensor],
        index: Tensor,
        draw: Tensor,
        rows: Mapping[str, Any],
    ) -> tuple[Tensors, dict[str, Tensor]]:
        with torch.enable_grad():
            leaves = _trainable(leaves)
            tensors = {
                model: {**group, **buffers.get(model, {})} for model, group in leaves.items()
            }
            with self.autocast():
                outputs = self.function(tensors, Batch(**batch), index, draw, rows)
            gradients = _differentiated(outputs["loss"], leaves)
        return gradients, {name: value.detach() for name, value in outputs.items()}

    def _of_all(
        self, tensors: tuple[Any, ...], dims: tuple[Any, ...]
    ) -> tuple[Tensors, dict[str, Tensor]]:
        """Stack the objective, and differentiate what it gives for all clients together."""

        def one(leaves: Tensors, batch: dict[str, Tensor], *rest: Any) -> dict[str, Tensor]:
            return self.function(leaves, Batch(**batch), *rest)

        with torch.enable_grad():
            leaves = _trainable(tensors[0])
            with self.autocast():
                outputs = torch.vmap(one, in_dims=dims)(leaves, *tensors[1:])
            return _differentiated(outputs["loss"].sum(), leaves), outputs

    def _one_for_many(self, *tensors: Any) -> Callable[..., tuple[Tensors, dict[str, Tensor]]]:
        """Return what gives gradients and outputs of one client, and may be stacked.

        Args:
            *tensors: Those of one client.
        """
        if self.casts:  # torch.vmap goes past autocast, and so over the casts written out
            return trace(self.function.client, self._of_one_alone, *tensors)
        found, _ = self._of_one_alone(*tensors)
        self._used = {model: tuple(group) for model, group in found.items()}
        return self._of_one_in_many

    def _of_one_alone(self, leaves: Tensors, *rest: Any) -> tuple[Tensors, dict[str, Tensor]]:
        return self._of_one(leaves, {}, *rest)

    def _of_one_in_many(
        self, leaves: Tensors, batch: dict[str, Tensor], *rest: Any
    ) -> tuple[Tensors, dict[str, Tensor]]:
        """The same, differentiable under ``torch.vmap``: products within it are faster."""

        def loss(used: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
            tensors = {model: {**leaves[model], **group} for model, group in used.items()}
            with self.autocast():
                outputs = self.function(tensors, Batch(**batch), *rest)
            return outputs["loss"], outputs

        used = {model: {n: leaves[model][n] for n in names} for model, names in self._used.items()}
        return torch.func.grad(loss, has_aux=True)(used)  # type: ignore[no-any-return]

    def _clipped(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        value = self.clipping.value
        if not value or not gradients:
            return gradients
        if self.clipping.algorithm == "value":
            return {name: gradient.clamp(-value, value) for name, gradient in gradients.items()}
        flat = [gradient.flatten(int(self.stacked)) for gradient in gradients.values()]
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
    """Notes whether an embedding has a padding index.

    Differentiated around ``torch.vmap``, all clients' tables are one, whose first client's row
    alone is known for the padding's.
    """

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (nn.functional.embedding, torch.embedding):
            padding = args[2] if len(args) > 2 else (kwargs or {}).get("padding_idx")
            self.found |= padding not in (None, -1)
        return func(*args, **(kwargs or {}))


def options_of(optimizer: torch.optim.Optimizer, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return SGD's numbers of the first step and of all others, each [groups, 4].

    Of any other optimizer there are none.
    """
    if type(optimizer) is not torch.optim.SGD:
        return like.new_empty(0), like.new_empty(0)
    rows = [[group[name] for name in OPTIONS] for group in optimizer.param_groups]
    first = [[rate, mass, 1.0, decay] for rate, mass, _, decay in rows]
    later = [[rate, mass, 1 - dampening, decay] for rate, mass, dampening, decay in rows]
    return tuple(torch.tensor(each, dtype=torch.float64).to(like) for each in (first, later))  # type: ignore[return-value]


def _trainable(leaves: Tensors) -> Tensors:
    return {
        model: {name: leaf.detach().requires_grad_() for name, leaf in group.items()}
        for model, group in leaves.items()
    }


def _differentiated(loss: Tensor, leaves: Tensors) -> Tensors:
    flat = [leaf for group in leaves.values() for leaf in group.values()]
    found = iter(torch.autograd.grad(loss, flat, allow_unused=True))
    return {
        model: {name: grad for name in group if (grad := next(found)) is not None}
        for model, group in leaves.items()
    }


def cloned(tree: Any) -> Any:
    """Return a copy of nested dicts of tensors, and of whatever else is in them."""
    return tree_map(Tensor.clone, tree)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return what nested dicts hold, in their order."""
    if isinstance(tree, dict):
        return [tensor for each in tree.values() for tensor in tensors_of(each)]
    if isinstance(tree, tuple | list):
        return [tensor for each in tree for tensor in tensors_of(each)]
    return [tree]


def with_tensors(tree: Any, tensors: Iterator[Tensor]) -> Any:
    """Return nested dicts like others, with other tensors in their order."""
    if isinstance(tree, dict):
        return {name: with_tensors(each, tensors) for name, each in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(with_tensors(each, tensors) for each in tree)
    return next(tensors)


def _replace(kept: Mapping[str, Tensor], new: Mapping[str, Tensor], running: Tensor) -> None:
    """Replace tensors in place, those of clients that do not stand still."""
    for name, tensor in new.items():
        kept[name].copy_(torch.where(_beside(running, kept[name]), tensor, kept[name]))


def _first(tree: Any, dim: Any) -> Any:
    """Take the first client's out of stacked tensors."""
    if isinstance(tree, dict):
        return {k: _first(v, dim[k] if isinstance(dim, dict) else dim) for k, v in tree.items()}
    if isinstance(tree, tuple) and isinstance(dim, tuple):
        return tuple(_first(*each) for each in zip(tree, dim))
    return tree if dim is None else select(tree, 0)


def _beside(numbers: Tensor, leaf: Tensor) -> Tensor:
    """Shape numbers [clients], or one number, to go with a leaf."""
    return numbers.view(-1, *([1] * (leaf.dim() - 1))) if numbers.dim() else numbers
