"""Local steps compiled whole, by ``torch.compile``: one client after the other, or stacked."""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.engine.base import Chunk, Clipping, Engine, built_anew, new_rows
from pl_fed.engine.program import CannotCompileError, Program, plain_attributes
from pl_fed.engine.stacked import check_stackable
from pl_fed.engine.step import LocalStep, fused_updates, options_of

_MOST_PROGRAMS = 4  # of one client: what changes from round to round is not worth compiling


class Compiled(Engine):
    """Runs the clients of a chunk by a compiled step, one by one or as one stack.

    A step (forward, backward, clipping, and SGD's update in place) is traced once and compiled for
    the shapes at hand. Tracing runs ``training_step`` once as Python: it may read tensors, and
    plain attributes of the client and its modules, a change of which compiles it anew. What reads
    the trainer, or draws from torch's own generators, is refused.

    Args:
        autocast: See :class:`Engine`.
        clipping: See :class:`Engine`.
        stacked: Whether the clients of a chunk are stacked. If not, minibatches of less than full
            size are run eagerly.
        size: Of a stack: how many clients it has room for.
        mode: ``mode`` of ``torch.compile``; ``"reduce-overhead"`` takes CUDA graphs.
    """

    def __init__(
        self,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        clipping: Clipping | None = None,
        stacked: bool = True,
        size: int = 1,
        mode: str | None = None,
    ) -> None:
        super().__init__(autocast, clipping)
        self.stacked = stacked
        self.size = size
        self.mode = mode
        self._client: Client | None = None
        self._programs: dict[Hashable, Program] = {}

    def run(
        self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> dict[str, Tensor]:
        """Train the chunk's rows in place: see :meth:`Engine.run`.

        Raises:
            CannotCompileError: If the step cannot be compiled; the rows are as they were.
            CannotStackError: If it cannot be stacked; likewise.
        """
        centres = chunk.centres_like(client.row(client.trains[0]).layout, client.trains)
        program = self._program(client, optimizer, chunk, centres)
        run = self._run_stack if self.stacked else self._run_in_turn
        with torch.no_grad():
            return run(program, optimizer, chunk, centres)

    def _program(
        self,
        client: Client,
        optimizer: torch.optim.Optimizer,
        chunk: Chunk,
        centres: dict[str, Tensor],
    ) -> Program:
        """Return what runs the chunk's steps; made when it is first asked for."""
        if self._client is not client:
            self._client, self._programs = client, {}
        own, data = client.row(client.trains[0]).data, chunk.batches.data
        dims = {name: None if row.dim() == 1 else 0 for name, row in centres.items()}
        signature = (
            (chunk.batches.width, data.x.shape[1:], data.y.shape[1:], data.y.dtype),
            (own.device, own.dtype, *dims.items()),
            (type(optimizer), *(fused_updates(client, optimizer) or ())),
            (self.clipping, *plain_attributes(client)),
        )
        if signature not in self._programs:
            if self.stacked:
                check_stackable(client, optimizer)
            if len(self._programs) == _MOST_PROGRAMS:
                raise CannotCompileError(
                    "shapes, options or attributes of the client change from round to round"
                )
            step = LocalStep(client, optimizer, self.clipping, self.autocast, self.stacked, dims)
            size = self.size if self.stacked else None
            self._programs[signature] = Program(step, client, size, self.mode)
        return self._programs[signature]

    def _run_stack(
        self,
        program: Program,
        optimizer: torch.optim.Optimizer,
        chunk: Chunk,
        centres: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        client, batches, shape = program.client, chunk.batches, (self.size, chunk.batches.width)
        program.load(chunk.rows, chunk.statistics, centres)
        options = options_of(optimizer, program.example)
        outside = _Outside.of(program, optimizer)
        index = torch.arange(batches.max_steps, device=client.device)
        ends = torch.tensor([*chunk.steps.values(), batches.steps], device=client.device)
        running = index[:, None, None] < _filled(ends, (len(ends), self.size))
        draws = _filled(
            chunk.draw_keys(client.draws).to(client.device), (self.size, batches.max_steps)
        )
        for step in range(batches.max_steps):
            batch = {
                name: _filled(each, shape) for name, each in batches.at(step)._asdict().items()
            }
            inputs = {
                **batch,
                "index": index[step],
                "draw": draws[:, step],
                "centres": program.centres,
                "running": running[step],
                "options": options[step > 0],
            }
            program(inputs, whole=True)
            if outside is not None:
                outside.step({m: _done(steps, step) for m, steps in chunk.steps.items()})
        number = len(chunk.clients)
        rows = {model: new_rows(chunk.rows[model]) for model in client.trains}
        program.write(rows, {})
        chunk.rows.update(rows)
        chunk.on_done(number)
        return {name: total[:number] / ends[-1] for name, total in program.totals.items()}

    def _run_in_turn(
        self,
        program: Program,
        optimizer: torch.optim.Optimizer,
        chunk: Chunk,
        centres: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        client, batches = program.client, chunk.batches
        options = options_of(optimizer, program.example)
        index = torch.arange(batches.max_steps, device=client.device)
        ends = torch.tensor([*chunk.steps.values(), batches.steps], device=client.device)
        running = index[:, None, None] < ends
        draws = chunk.draw_keys(client.draws).to(client.device)
        rows = {model: new_rows(chunk.rows[model]) for model in client.trains}
        statistics = {model: new_rows(each) for model, each in chunk.statistics.items()}
        outputs = []
        for position, number in enumerate(batches.steps):
            own = {name: row if row.dim() == 1 else row[position] for name, row in centres.items()}
            program.load(_at(chunk.rows, position), _at(chunk.statistics, position), own)
            outside = _Outside.of(program, optimizer)
            for step, batch in enumerate(batches.of(position)):
                inputs = {
                    **{name: each for name, each in batch._asdict().items() if each is not None},
                    "index": index[step],
                    "draw": draws[position, step],
                    "centres": program.centres,
                    "running": running[step, :, position],
                    "options": options[step > 0],
                }
                program(inputs, whole=len(batch.y) == batches.width)
                if outside is not None:
                    outside.step({m: step >= steps[position] for m, steps in chunk.steps.items()})
            program.write(_at(rows, position), _at(statistics, position))
            outputs.append({name: total / number for name, total in program.totals.items()})
            chunk.on_done(position + 1)
        chunk.rows.update(rows)
        chunk.statistics.update(statistics)
        return {name: torch.stack([each[name] for each in outputs]) for name in outputs[0]}


class _Outside:
    """An optimizer that is not part of the step, and moves by the gradients left for it."""

    def __init__(self, program: Program, optimizer: torch.optim.Optimizer) -> None:
        self.program = program
        leaves = {model: list(group.values()) for model, group in program.leaves.items()}
        self.optimizer = built_anew(program.client, optimizer, leaves)

    @classmethod
    def of(cls, program: Program, optimizer: torch.optim.Optimizer) -> "_Outside | None":
        """Return it, if the optimizer is such a one."""
        return cls(program, optimizer) if program.step.updates is None else None

    def step(self, still: dict[str, Any]) -> None:
        """Move the leaves.

        Args:
            still: For each model which clients of a stack stand still (their positions), or whether
                the one client does.
        """
        kept = []
        for model, group in self.program.leaves.items():
            gradients, done = self.program.gradients[model], still[model]
            for name, leaf in group.items():
                leaf.grad = None if done is True else gradients.get(name)
                if isinstance(done, list) and done:
                    kept.append((leaf, done, leaf[done]))
        self.optimizer.step()
        for leaf, done, value in kept:
            leaf[done] = value


def _done(steps: list[int], step: int) -> list[int]:
    return [position for position, count in enumerate(steps) if step >= count]


def _at(rows: dict[str, Tensor], position: int) -> dict[str, Tensor]:
    return {name: row[position] for name, row in rows.items() if row.dim() == 2}


def _filled(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Fill the first dimensions up with zeros, for clients and samples that are not there."""
    if tensor.shape[: len(shape)] == shape:
        return tensor
    filled = tensor.new_zeros(*shape, *tensor.shape[len(shape) :])
    filled[tuple(slice(n) for n in tensor.shape[: len(shape)])] = tensor
    return filled
