"""Optimizers that move the leaves of a batched local step, outside of the step."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pl_fed.clients.contract import Objective
from pl_fed.devices import move_positions, numbers_on
from pl_fed.engine.base import LocalSettings, rebuild_optimizer, set_rates
from pl_fed.engine.optimizer_states import OptimizerStates
from pl_fed.engine.step import Tensors, clip_gradients

_Positions = slice | Tensor


class ExternalOptimizer:
    """External optimizer: moves a step's leaves by the gradients that the step returns.

    If several minibatches make up an optimizer step, it adds up their gradients, and clips the sum.

    Args:
        objective: The objective; it builds the optimizer.
        optimizer: The local optimizer, with this round's options.
        leaves: The leaves of each trained model.
        counts: The number of minibatches of each client, by trained model.
        plan: Whether the optimizer steps after each minibatch: see :meth:`Chunk.plan_steps`.
        settings: Clipping and accumulation.
        rates: The learning rates of the clients, equal for all, [steps, groups]; ``None`` for those
            of the optimizer.
        stacked: Whether the leaves are those of a stack; otherwise, they are those of one client.

    Attributes:
        optimizer: The optimizer of the leaves.
        parameters: The leaves of each trained model, as lists.
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        leaves: Tensors,
        counts: Mapping[str, list[int]],
        plan: list[bool],
        settings: LocalSettings,
        rates: Tensor | None,
        stacked: bool,
    ) -> None:
        self._leaves = leaves
        self._counts = counts
        self._plan = plan
        self._settings = settings
        self._rates = rates
        self._stacked = stacked
        self._sums: Tensors = {model: {} for model in leaves}
        self._first = 0  # the first minibatch of the next optimizer step
        self._placed: dict[tuple[int, ...], Tensor] = {}
        self.parameters = {model: list(group.values()) for model, group in leaves.items()}
        self.optimizer = rebuild_optimizer(objective, optimizer, self.parameters)
        # fused steps read gradients in the memory order of their leaves
        self._is_fused = any(group.get("fused") for group in self.optimizer.param_groups)

    def step(self, index: int, gradients: Tensors) -> None:
        """Move the leaves, or add the gradients of a minibatch to those of the next move.

        Args:
            index: The index of the minibatch.
            gradients: The gradients of each model.
        """
        if self._settings.batches_per_step > 1:
            self._add(index, gradients)
            if not self._plan[index]:
                return
            gradients = clip_gradients(self._sums, self._settings.clipping, self._stacked)
            self._sums = {model: {} for model in self._leaves}
        first, self._first = self._first, index + 1
        fixed = []
        for model, group in self._leaves.items():
            finished = self._find_finished(model, first)
            is_over = len(finished) == len(self._counts[model])
            for name, leaf in group.items():
                gradient = None if is_over else gradients[model].get(name)
                if gradient is not None and self._is_fused:
                    gradient = gradient.contiguous()
                leaf.grad = gradient
                if finished and not is_over:
                    places = self._find_places(finished, leaf)
                    fixed.append((leaf, places, leaf[places]))
        set_rates(self.optimizer, self._rates, index)
        self.optimizer.step()
        for leaf, places, value in fixed:
            leaf[places] = value

    def _find_places(self, positions: list[int], leaf: Tensor) -> Tensor:
        """Return positions on the device of a leaf; a list is copied there once."""
        places = self._placed.get(tuple(positions))
        if places is None:
            places = self._placed[tuple(positions)] = numbers_on(leaf, positions)
        return places

    def _find_finished(self, model: str, index: int) -> list[int]:
        """Return the positions of the clients that do not train a model on a minibatch."""
        return [place for place, count in enumerate(self._counts[model]) if index >= count]

    def _add(self, index: int, gradients: Tensors) -> None:
        """Add the gradients of a minibatch, but for clients that have completed their steps."""
        for model, group in gradients.items():
            finished, sums = self._find_finished(model, index), self._sums[model]
            if len(finished) == len(self._counts[model]):
                continue
            for name, gradient in group.items():
                part = gradient / self._settings.batches_per_step
                if finished:
                    part.index_fill_(0, self._find_places(finished, part), 0)
                sums[name] = sums[name] + part if name in sums else part


class StackOptimizer:
    """Stack optimizer: moves the leaves of a stack of clients.

    If clients keep the states of their optimizers, step after different minibatches, or have
    different learning rates, the stack is split: each part has an optimizer of its own, since
    torch's optimizers have one rate, and count one number of steps, for a tensor.

    Args:
        objective: The objective; it builds the optimizers.
        optimizer: The local optimizer, with this round's options.
        leaves: The leaves of each trained model, [clients, *shape] each.
        states: The states of the clients' optimizers.
        settings: Clipping and accumulation.
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        leaves: Tensors,
        states: OptimizerStates,
        settings: LocalSettings,
    ) -> None:
        self._leaves, self._states = leaves, states
        chunk, clients = states.chunk, range(len(states.chunk.clients))
        length, per_step = chunk.batches.max_steps, settings.batches_per_step
        plans = [chunk.plan_steps(per_step, position, length) for position in clients]
        self._is_split = states.are_kept or per_step > 1 or chunk.rates is not None
        parts = states.split_stack(plans, chunk.rates) if self._is_split else [slice(None)]
        self._parts: list[tuple[_Positions, _Positions, ExternalOptimizer]] = []
        example = next(leaf for group in leaves.values() for leaf in group.values())
        for positions in parts:
            own = list(clients[positions] if isinstance(positions, slice) else positions.tolist())
            counts = {
                model: [steps[client] for client in own] for model, steps in chunk.steps.items()
            }
            places = move_positions(positions, like=example)
            part = ExternalOptimizer(
                objective,
                optimizer,
                _select(leaves, places),
                counts,
                plans[own[0]],
                settings,
                None if chunk.rates is None else chunk.rates[own[0]],
                stacked=True,
            )
            states.load(part.optimizer, part.parameters, positions)
            self._parts.append((positions, places, part))

    def step(self, index: int, gradients: Tensors) -> None:
        """Move the leaves: see :meth:`ExternalOptimizer.step`."""
        for _, places, part in self._parts:
            part.step(index, _select(gradients, places) if self._is_split else gradients)
            if isinstance(places, Tensor):  # an indexed part is a copy
                for model, parameters in part.parameters.items():
                    for leaf, moved in zip(self._leaves[model].values(), parameters):
                        leaf[places] = moved

    def hand_over(self) -> None:
        """Replace the chunk's optimizer states by those after the local steps."""
        for positions, _, part in self._parts:
            self._states.store(part.optimizer, part.parameters, positions)
        self._states.hand_over()


def _select(tensors: Tensors, positions: _Positions) -> Tensors:
    """Return the leaves or gradients of a part of a stack."""
    return {
        model: {name: tensor[positions] for name, tensor in group.items()}
        for model, group in tensors.items()
    }
