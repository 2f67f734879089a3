"""Optimizers that move the leaves of a batched local step, outside of the step."""

from typing import Any

import torch
from torch import Tensor

from pl_fed.clients.contract import Objective
from pl_fed.engine.base import rebuild_optimizer
from pl_fed.engine.optimizer_states import OptimizerStates
from pl_fed.engine.step import Tensors


class ExternalOptimizer:
    """External optimizer: moves a step's leaves by the gradients that the step returns.

    Args:
        objective: The objective; it builds the optimizer.
        optimizer: The local optimizer, with this round's options.
        leaves: The leaves of each trained model.

    Attributes:
        optimizer: The optimizer of the leaves.
        parameters: The leaves of each trained model, as lists.
    """

    def __init__(
        self, objective: Objective, optimizer: torch.optim.Optimizer, leaves: Tensors
    ) -> None:
        self._leaves = leaves
        self.parameters = {model: list(group.values()) for model, group in leaves.items()}
        self.optimizer = rebuild_optimizer(objective, optimizer, self.parameters)

    def step(self, gradients: Tensors, finished: dict[str, Any]) -> None:
        """Move the leaves.

        Args:
            gradients: The gradients of each model.
            finished: For each model the positions of the stacked clients that have completed their
                steps, or whether the one client has.
        """
        fixed = []
        for model, group in self._leaves.items():
            positions = finished[model]
            for name, leaf in group.items():
                leaf.grad = None if positions is True else gradients[model].get(name)
                if isinstance(positions, list) and positions:
                    fixed.append((leaf, positions, leaf[positions]))
        self.optimizer.step()
        for leaf, positions, value in fixed:
            leaf[positions] = value


class StackOptimizer:
    """Stack optimizer: moves the leaves of a stack of clients.

    If clients keep the states of their optimizers, the stack is split: each part has an optimizer
    of its own, since torch's optimizers count one number of steps for a tensor.

    Args:
        objective: The objective; it builds the optimizers.
        optimizer: The local optimizer, with this round's options.
        leaves: The leaves of each trained model, [clients, *shape] each.
        states: The states of the clients' optimizers.
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        leaves: Tensors,
        states: OptimizerStates,
    ) -> None:
        self._leaves, self._states = leaves, states
        self._parts: list[tuple[slice | Tensor, ExternalOptimizer]] = []
        for positions in states.split_stack() if states.are_kept else [slice(None)]:
            part = ExternalOptimizer(objective, optimizer, _select(leaves, positions))
            states.load(part.optimizer, part.parameters, positions)
            self._parts.append((positions, part))

    def step(self, gradients: Tensors, finished: dict[str, list[int]]) -> None:
        """Move the leaves: see :meth:`ExternalOptimizer.step`."""
        if not self._states.are_kept:
            self._parts[0][1].step(gradients, finished)
            return
        for positions, part in self._parts:
            first = positions.start if isinstance(positions, slice) else int(positions[0])
            is_finished = {model: first in clients for model, clients in finished.items()}
            part.step(_select(gradients, positions), is_finished)
            if isinstance(positions, Tensor):  # an indexed part is a copy
                for model, parameters in part.parameters.items():
                    for leaf, moved in zip(self._leaves[model].values(), parameters):
                        leaf[positions] = moved

    def hand_over(self) -> None:
        """Replace the chunk's optimizer states by those after the local steps."""
        for positions, part in self._parts:
            self._states.store(part.optimizer, part.parameters, positions)
        self._states.hand_over()


def _select(tensors: Tensors, positions: slice | Tensor) -> Tensors:
    """Return the leaves or gradients of a part of a stack."""
    return {
        model: {name: tensor[positions] for name, tensor in group.items()}
        for model, group in tensors.items()
    }
