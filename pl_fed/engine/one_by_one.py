"""One client after the other, on the client's own modules: what a hand-written loop does."""

import torch
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.engine.base import Chunk, Engine, as_outputs
from pl_fed.functional.random import generator


class OneByOne(Engine):
    """Runs the clients of a chunk in turn, eagerly. It takes any net and any optimizer."""

    def run(
        self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> dict[str, Tensor]:
        """Train the chunk's rows in place: see :meth:`Engine.run`."""
        devices = [client.device] if client.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            outputs = [
                self._run_client(client, optimizer, chunk, position)
                for position in range(len(chunk.clients))
            ]
        optimizer.state.clear()
        optimizer.zero_grad()
        client.centres = {}
        names = outputs[0] if outputs else {}
        return {name: torch.stack([each[name] for each in outputs]) for name in names}

    def _run_client(
        self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk, position: int
    ) -> dict[str, Tensor]:
        _seed_layers(chunk, position)
        for model in client.trains:
            client.row(model).data.copy_(chunk.rows[model][position])
            if model in chunk.statistics:
                client.statistics(model).data.copy_(chunk.statistics[model][position])
        centres = chunk.centres(client.trains)
        client.centres = {
            name: row if row.dim() == 1 else row[position] for name, row in centres.items()
        }
        optimizer.state.clear()  # the local optimizer is built anew each round
        groups = [
            (group, chunk.steps[model][position])
            for model, group in zip(client.trains, optimizer.param_groups)
        ]
        totals: dict[str, Tensor] = {}
        step = -1
        for step, batch in enumerate(chunk.batches.of(position)):
            client.draws.key = chunk.draw_key(position, step)
            optimizer.zero_grad()
            with self.autocast():
                outputs = as_outputs(client.training_step(batch, step))
            outputs["loss"].backward()
            for group, steps in groups:
                self._prepare(group["params"], still=step >= steps)
            optimizer.step()
            for name, value in outputs.items():
                value = value.detach()
                totals[name] = totals[name] + value if name in totals else value
        for model in client.trains:
            chunk.rows[model][position] = client.row(model).data
            if model in chunk.statistics:
                chunk.statistics[model][position] = client.statistics(model).data
        return {name: total / (step + 1) for name, total in totals.items()}

    def _prepare(self, parameters: list[nn.Parameter], still: bool) -> None:
        """Clip a model's gradients, or drop them where the model stands still."""
        value = self.clipping.value
        if still:
            for parameter in parameters:
                parameter.grad = None
        if still or not value:
            return
        if self.clipping.algorithm == "value":
            nn.utils.clip_grad_value_(parameters, value)
        else:
            nn.utils.clip_grad_norm_(parameters, value)


def _seed_layers(chunk: Chunk, position: int) -> None:
    """Seed torch's global generator, which layers without keyed draws follow."""
    batches = chunk.batches
    seed = generator(batches.seed, "torch", batches.round, batches.clients[position])
    torch.manual_seed(seed.initial_seed())
