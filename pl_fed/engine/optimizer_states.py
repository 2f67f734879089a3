"""The states of local optimizers that clients keep between rounds, before and after local steps."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.engine.base import Chunk, allocate_rows


class OptimizerStates:
    """Optimizer states: the states of a chunk's local optimizers, by trained model.

    Without kept states, optimizers begin with their own initial values, and nothing is stored.

    Args:
        client: The algorithm; it has the layouts of the states.
        chunk: The clients.
    """

    def __init__(self, client: Client, chunk: Chunk) -> None:
        self.chunk = chunk
        self._before = chunk.round.optimizer_states
        self._layouts = client.optimizer_layouts if self._before else {}
        self._after = {model: allocate_rows(rows) for model, rows in self._before.items()}

    @property
    def are_kept(self) -> bool:
        """Whether the clients keep states between rounds."""
        return bool(self._before)

    def load(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, list[Tensor]],
        positions: int | slice | Tensor,
    ) -> None:
        """Set the state of a new optimizer.

        Args:
            optimizer: The optimizer of one client, or of a stack.
            parameters: The tensors that it moves, by trained model.
            positions: The position of the client; or the positions of the stack, as
                :meth:`split_stack` returns them.
        """
        for model, layout in self._layouts.items():
            layout.load(optimizer, parameters[model], self._before[model][positions])

    def store(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, list[Tensor]],
        positions: int | slice | Tensor,
    ) -> None:
        """Store the state of an optimizer after the local steps; see :meth:`load`."""
        for model, layout in self._layouts.items():
            rows = self._after[model]
            own = rows[positions]
            layout.store(optimizer, parameters[model], own)
            if isinstance(positions, Tensor):  # an indexed part is a copy
                rows[positions] = own

    def hand_over(self) -> None:
        """Replace the chunk's states by those after the local steps."""
        self.chunk.round.optimizer_states.update(self._after)

    def split_stack(self, plans: list[list[bool]], rates: Tensor | None) -> list[slice | Tensor]:
        """Return the positions of the clients that one optimizer can move together.

        They step after the same minibatches, with the same learning rates. If states are kept, they
        also take equally many local steps, and their states have equal shared numbers, such as the
        count of steps.

        Args:
            plans: The plan of each client: see :meth:`Chunk.plan_steps`.
            rates: The learning rates of each client: see :class:`Chunk`.
        """
        numbers = torch.tensor(plans, dtype=torch.float64)
        if rates is not None:
            numbers = torch.cat([numbers, rates.flatten(1)], dim=1)
        if self.are_kept:
            steps = torch.tensor([*self.chunk.steps.values()], dtype=torch.float64).T
            shared = [
                layout.common_numbers(self._before[model]).to(steps)
                for model, layout in self._layouts.items()
            ]
            numbers = torch.cat([numbers, steps, *shared], dim=1)
        groups = numbers.unique(dim=0, return_inverse=True)[1]
        positions = [
            (groups == group).nonzero().flatten() for group in range(int(groups.max()) + 1)
        ]
        return [_as_slice(group) for group in positions]


def _as_slice(positions: Tensor) -> slice | Tensor:
    """Return consecutive positions as a slice: a part of a tensor is then no copy."""
    first, last = int(positions[0]), int(positions[-1])
    return slice(first, last + 1) if last - first + 1 == len(positions) else positions
