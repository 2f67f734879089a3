"""One client after the other, on the client's own modules: what a hand-written loop does."""

import torch
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.engine.base import Chunk, Engine, as_outputs, built_anew
from pl_fed.functional.random import key, seeded_torch


class OneByOne(Engine):
    """Runs the clients of a chunk in turn, eagerly. It takes any net and any optimizer."""

    def run(
        self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> dict[str, Tensor]:
        """Train the chunk's rows in place: see :meth:`Engine.run`."""
        batches, models = chunk.batches, _LiveModels(client, chunk)
        leaves = {model: list(client.row(model).tensors.values()) for model in client.trains}
        centres = chunk.centres(client.trains)
        outputs = []
        with seeded_torch(client.device) as seed:
            for position, one in enumerate(batches.clients):
                seed(key(batches.seed, "torch", batches.round, one))
                models.load(position)
                client.centres = {
                    name: row if row.dim() == 1 else row[position] for name, row in centres.items()
                }
                anew = built_anew(client, optimizer, leaves)
                outputs.append(self._steps(client, anew, chunk, models, position))
                chunk.on_done(position + 1)
        models.restore_counters()
        client.zero_grad()
        client.centres = {}
        client.draws.start(0)
        return {name: torch.stack([each[name] for each in outputs]) for name in outputs[0]}

    def _steps(
        self,
        client: Client,
        optimizer: torch.optim.Optimizer,
        chunk: Chunk,
        models: "_LiveModels",
        position: int,
    ) -> dict[str, Tensor]:
        """Take one client's steps, and keep each model when it has done its own."""
        groups = [
            (group["name"], group["params"], chunk.steps[group["name"]][position])
            for group in optimizer.param_groups
        ]
        totals: dict[str, Tensor] = {}
        step = -1
        keys = chunk.draw_keys[position].tolist()
        for step, batch in enumerate(chunk.batches.of(position)):
            client.draws.start(keys[step])
            optimizer.zero_grad()
            with self.autocast():
                outputs = as_outputs(client.training_step(batch, step))
            outputs["loss"].backward()
            for _, parameters, steps in groups:
                if step >= steps:
                    _stand_still(parameters)
                elif self.clipping.value:
                    self._clip(parameters, self.clipping.value)
            optimizer.step()
            for model, _, steps in groups:
                if step + 1 == steps:
                    models.keep(model, position)
            for name, value in outputs.items():
                value = value.detach()
                totals[name] = totals[name] + value if name in totals else value
        return {name: total / (step + 1) for name, total in totals.items()}

    def _clip(self, parameters: list[nn.Parameter], value: float) -> None:
        if self.clipping.algorithm == "value":
            nn.utils.clip_grad_value_(parameters, value)
        else:
            nn.utils.clip_grad_norm_(parameters, value)


def _stand_still(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None  # optimizers leave it out


class _LiveModels:
    """The client's own models, through which the clients of a chunk pass one after the other."""

    def __init__(self, client: Client, chunk: Chunk) -> None:
        self.tensors = [
            (model, live, kept)
            for model in client.trains
            for live, kept in (
                (client.row(model).data, chunk.rows[model]),
                (client.statistics(model).data, chunk.statistics.get(model)),
            )
            if kept is not None and kept.numel()
        ]
        # how many batches BatchNorm has seen: no row holds it, and each client begins with the same
        counters = [buffer for buffer in client.buffers() if not buffer.is_floating_point()]
        self.counters = [(buffer, buffer.clone()) for buffer in counters]

    def load(self, position: int) -> None:
        """Make the models those of a client."""
        for _, live, kept in self.tensors:
            live.copy_(kept[position])
        self.restore_counters()

    def restore_counters(self) -> None:
        """Put integer buffers back to what they were before the first client."""
        for buffer, value in self.counters:
            buffer.copy_(value)

    def keep(self, model: str, position: int) -> None:
        """Write one of them back to the client's rows."""
        for name, live, kept in self.tensors:
            if name == model:
                kept[position].copy_(live)
