"""One client after the other, by a compiled step."""

import torch
from torch import Tensor

from pl_fed.engine.base import Chunk, new_rows
from pl_fed.engine.program import Program
from pl_fed.engine.step import options_of
from pl_fed.engine.stepping import Outside, Stepping


class OneByOneCompiled(Stepping):
    """Runs the clients of a chunk in turn, each minibatch of full size by the compiled step.

    Smaller minibatches, a pass's last as a rule, are run eagerly.
    """

    def run_steps(
        self,
        program: Program,
        optimizer: torch.optim.Optimizer,
        chunk: Chunk,
        centres: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Run the chunk's steps."""
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
            outside = Outside.of(program, optimizer)
            for step, batch in enumerate(batches.of(position)):
                inputs = {
                    **{name: each for name, each in batch._asdict().items() if each is not None},
                    "index": index[step],
                    "draw": draws[position, step],
                    "centres": program.centres,
                    "running": running[step, :, position],
                    "options": options[step > 0],
                }
                gradients = program(inputs, whole=len(batch.y) == batches.width)
                if outside is not None:
                    still = {model: step >= each[position] for model, each in chunk.steps.items()}
                    outside.step(gradients, still)
            program.write(_at(rows, position), _at(statistics, position))
            outputs.append({name: total / number for name, total in program.totals.items()})
            chunk.on_done(position + 1)
        chunk.rows.update(rows)
        chunk.statistics.update(statistics)
        return {name: torch.stack([each[name] for each in outputs]) for name in outputs[0]}


def _at(rows: dict[str, Tensor], position: int) -> dict[str, Tensor]:
    return {name: row[position] for name, row in rows.items() if row.dim() == 2}
