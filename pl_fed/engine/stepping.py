"""What engines share that take local steps as functions of tensors."""

from abc import abstractmethod
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.contract import Objective
from pl_fed.engine.base import Chunk, Clipping, Engine, casts, rebuild_optimizer
from pl_fed.engine.program import Program, plain_attributes
from pl_fed.engine.step import LocalStep, Tensors, updates_of
from pl_fed.engine.tracing import CannotCompileError
from pl_fed.trees import describe

_MOST_PROGRAMS = 4  # of one client: what changes from round to round is not worth compiling


class Stepping(Engine):
    """Runs clients by :class:`LocalStep`, which may be compiled.

    A compiled step (forward, backward, clipping, and SGD's update in place) is traced once and
    compiled for the shapes at hand. Tracing runs ``training_step`` once as Python: it may read
    tensors, and plain attributes of the client and its modules, a change of which compiles it anew.
    What reads the trainer, or draws from torch's own generators, is refused.

    Args:
        autocast: See :class:`Engine`.
        clipping: See :class:`Engine`.
        size: How many clients are stacked; ``None`` for one after the other.
        compiled: Whether the step is compiled.
        mode: ``mode`` of ``torch.compile``; ``"reduce-overhead"`` takes CUDA graphs.
    """

    def __init__(
        self,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        clipping: Clipping | None = None,
        size: int | None = None,
        compiled: bool = False,
        mode: str | None = None,
    ) -> None:
        super().__init__(autocast, clipping)
        self.size = size
        self.compiled = compiled
        self.mode = mode
        self._objective: Objective | None = None
        self._programs: dict[Hashable, Program] = {}

    def run(
        self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> dict[str, Tensor]:
        """Train the chunk's rows: see :meth:`Engine.run`.

        Raises:
            CannotCompileError: If the step cannot be compiled; the rows are as they were.
        """
        rows = chunk.round.readable()
        program = self.program(client, optimizer, chunk, rows)
        try:
            with torch.no_grad():
                return self.run_steps(program, optimizer, chunk, rows)
        except Exception as error:
            chunk.add_note(error, range(len(chunk.clients)))
            raise

    @abstractmethod
    def run_steps(
        self,
        program: Program,
        optimizer: torch.optim.Optimizer,
        chunk: Chunk,
        rows: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Run the chunk's steps; ``rows`` are those that the objective may read."""

    def program(
        self,
        client: Client,
        optimizer: torch.optim.Optimizer,
        chunk: Chunk,
        rows: dict[str, Tensor],
    ) -> Program:
        """Return the program that runs the chunk's steps; it is made when first asked for."""
        objective = chunk.objective
        if self._objective is not objective:
            self._objective, self._programs = objective, {}
        own, data = client.row(objective.trained[0]).data, chunk.batches.data
        dims = {name: None if row.dim() == 1 else 0 for name, row in rows.items()}
        updates = updates_of(objective, optimizer) if self.compiled else None
        traced = self.compiled or casts(self.autocast, client.device)
        signature = (
            (chunk.batches.width, str(describe(data.inputs)), str(describe(data.targets))),
            (own.device, own.dtype, *dims.items()),
            (type(optimizer), *(updates or ())),
            *(plain_attributes(client) if traced else ()),
        )
        if signature not in self._programs:
            if len(self._programs) == _MOST_PROGRAMS and not self.compiled:
                self._programs.clear()
            elif len(self._programs) == _MOST_PROGRAMS:
                raise CannotCompileError(
                    "shapes, options or attributes of the client change from round to round"
                )
            stacked = self.size is not None
            step = LocalStep(
                client,
                objective,
                updates,
                clipping=self.clipping,
                autocast=self.autocast,
                stacked=stacked,
                row_dims=dims,
                compiled=self.compiled,
            )
            self._programs[signature] = Program(step, client, self.size, self.compiled, self.mode)
        return self._programs[signature]


class Outside:
    """An optimizer that is not part of the step, and moves by the gradients that it returns.

    Args:
        program: What it moves.
        optimizer: The local optimizer, with this round's options.
    """

    def __init__(self, program: Program, optimizer: torch.optim.Optimizer) -> None:
        self.program = program
        leaves = {model: list(group.values()) for model, group in program.leaves.items()}
        self.optimizer = rebuild_optimizer(program.step.objective, optimizer, leaves)

    @classmethod
    def of(cls, program: Program, optimizer: torch.optim.Optimizer) -> "Outside | None":
        """Return it, if there is such a one."""
        return cls(program, optimizer) if program.step.updates is None else None

    def step(self, gradients: Tensors, still: dict[str, Any]) -> None:
        """Move the leaves.

        Args:
            gradients: Of each model.
            still: For each model which clients of a stack stand still (their positions), or whether
                the one client does.
        """
        kept = []
        for model, group in self.program.leaves.items():
            done = still[model]
            for name, leaf in group.items():
                leaf.grad = None if done is True else gradients[model].get(name)
                if isinstance(done, list) and done:
                    kept.append((leaf, done, leaf[done]))
        self.optimizer.step()
        for leaf, done, value in kept:
            leaf[done] = value


def filled(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Fill the first dimensions up with zeros, for clients and samples that are not there.

    Example:
        >>> filled(torch.ones(1, 2), (2, 3))
        tensor([[1., 1., 0.],
                [0., 0., 0.]])
    """
    if tensor.shape[: len(shape)] == shape:
        return tensor
    whole = tensor.new_zeros(*shape, *tensor.shape[len(shape) :])
    whole[tuple(slice(n) for n in tensor.shape[: len(shape)])] = tensor
    return whole
