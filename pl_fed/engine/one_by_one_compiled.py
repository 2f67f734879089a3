"""One client after the other, by a compiled step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pl_fed.clients.contract import ModelRows
from pl_fed.engine.base import Chunk, new_rows
from pl_fed.engine.program import Program
from pl_fed.engine.step import options_of
from pl_fed.engine.stepping import Outside, Stepping
from pl_fed.random import fork_torch_rng, key
from pl_fed.types import Batch


class OneByOneCompiled(Stepping):
    """Runs the clients of a chunk in turn, each minibatch of full size by the compiled step.

    Smaller minibatches, a pass's last as a rule, are run eagerly.
    """

    def run_steps(
        self,
        program: Program,
        optimizer: torch.optim.Optimizer,
        chunk: Chunk,
        rows: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Run the chunk's steps."""
        batches, device, models = chunk.batches, program.client.device, chunk.round.models
        trained = {
            model: ModelRows(new_rows(models[model].parameters), new_rows(models[model].statistics))
            for model in chunk.objective.trained
        }
        inputs, outputs = self._inputs(program, optimizer, chunk), []
        with fork_torch_rng(device) as seed:
            for position, one in enumerate(batches.clients):
                seed(key(batches.seed, "torch", batches.round, one))
                program.load(_select(models, position), _select_rows(rows, position))
                outside = Outside.of(program, optimizer)
                for step, batch in enumerate(batches.of(position)):
                    whole = batch.size == batches.width
                    gradients = program(inputs(position, step, batch), whole)
                    if outside is not None:
                        done = {model: step >= n[position] for model, n in chunk.steps.items()}
                        outside.step(gradients, done)
                program.write(_select(trained, position))
                number = batches.steps[position]
                outputs.append({name: total / number for name, total in program.totals.items()})
                chunk.on_done(position + 1)
        models.update(trained)
        return {name: torch.stack([each[name] for each in outputs]) for name in outputs[0]}

    def _inputs(
        self, program: Program, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> Callable[[int, int, Batch], dict[str, Any]]:
        """Return what makes a step's inputs, for a client by its position."""
        device, batches = program.client.device, chunk.batches
        options = options_of(optimizer, program.example)
        index = torch.arange(batches.max_steps, device=device)
        ends = torch.tensor([*chunk.steps.values(), batches.steps], device=device)
        running = index[:, None] < ends.T[:, None]
        draws = chunk.draw_keys(program.client.draws).to(device)

        def inputs(position: int, step: int, batch: Batch) -> dict[str, Any]:
            return {
                **{name: each for name, each in batch._asdict().items() if each is not None},
                "index": index[step],
                "draw": draws[position, step],
                "rows": program.rows,
                "running": running[position, step],
                "options": options[step > 0],
            }

        return inputs


def _select(models: dict[str, ModelRows], position: int) -> dict[str, ModelRows]:
    """Return one client's models."""
    return {name: rows[position] for name, rows in models.items()}


def _select_rows(rows: dict[str, Tensor], position: int) -> dict[str, Tensor]:
    """Return the rows that one client may read."""
    return {name: row if row.dim() == 1 else row[position] for name, row in rows.items()}
