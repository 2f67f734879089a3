"""One client after the other, on the client's own modules, as a hand-written loop does."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ModelRows
from pl_fed.engine.base import (
    Chunk,
    Engine,
    as_outputs,
    new_rows,
    rebuild_optimizer,
    select_rows,
    stack_outputs,
)
from pl_fed.nets.rows import buffers_outside_rows
from pl_fed.random import fork_torch_rng, key
from pl_fed.types import Batch


class OneByOne(Engine):
    """Runs the clients of a chunk in turn, eagerly. It takes any net and any optimizer."""

    def run(
        self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> dict[str, Tensor]:
        """Train the chunk's rows: see :meth:`Engine.run`."""
        batches, objective, models = chunk.batches, chunk.objective, _LiveModels(client, chunk)
        parameters = {
            model: list(client.row(model).tensors.values()) for model in objective.trained
        }
        rows = chunk.round.readable()
        keys: list[list[int]] = chunk.draw_keys(client.draws).tolist()
        outputs = []
        with fork_torch_rng(client.device) as seed:
            for position, client_id in enumerate(batches.clients):
                seed(key(batches.seed, "torch", batches.round, client_id))
                models.load(position)
                rebuilt = rebuild_optimizer(objective, optimizer, parameters)
                with client.reading(select_rows(rows, position)):
                    means = self._steps(client, rebuilt, chunk, models, position, keys[position])
                outputs.append(means)
                chunk.on_done(position + 1)
        models.hand_over()
        models.restore_counters()
        client.zero_grad()
        client.draws.start(0)
        return stack_outputs(outputs)

    def _steps(
        self,
        client: Client,
        optimizer: torch.optim.Optimizer,
        chunk: Chunk,
        models: "_LiveModels",
        position: int,
        keys: list[int],
    ) -> dict[str, Tensor]:
        """Take one client's steps, and keep each model when it has done its own."""
        groups = [
            (group["name"], group["params"], chunk.steps[group["name"]][position])
            for group in optimizer.param_groups
        ]
        for model, _, steps in groups:
            if steps == 0:
                models.keep(model, position)
        totals: dict[str, Tensor] = {}
        step = -1
        for step, batch in enumerate(chunk.batches.iterate_client(position)):
            client.draws.start(keys[step])
            optimizer.zero_grad()
            outputs = self._differentiate(chunk, batch, position, step)
            for _, parameters, steps in groups:
                if step >= steps:
                    _stand_still(parameters)
                elif self.settings.clipping.value:
                    self._clip(parameters, self.settings.clipping.value)
            optimizer.step()
            for model, _, steps in groups:
                if step + 1 == steps:
                    models.keep(model, position)
            for name, value in outputs.items():
                value = value.detach()
                totals[name] = totals[name] + value if name in totals else value
        return {name: total / (step + 1) for name, total in totals.items()}

    def _differentiate(
        self, chunk: Chunk, batch: Batch, position: int, step: int
    ) -> dict[str, Tensor]:
        """Return the outputs of one client's local step, whose loss is differentiated.

        An exception carries the round, the client and the step as a note.
        """
        try:
            with self.settings.autocast():
                outputs = as_outputs(chunk.objective.step(batch, step))
            outputs["loss"].backward()
        except Exception as error:
            chunk.add_note(error, [position], step)
            raise
        return outputs

    def _clip(self, parameters: list[nn.Parameter], value: float) -> None:
        if self.settings.clipping.algorithm == "value":
            nn.utils.clip_grad_value_(parameters, value)
        else:
            nn.utils.clip_grad_norm_(parameters, value)


def _stand_still(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None  # optimizers leave it out


class _LiveModels:
    """The client's own models, through which the clients of a chunk pass one after the other."""

    def __init__(self, client: Client, chunk: Chunk) -> None:
        self.places: list[_Place] = []
        self.models = chunk.round.models
        self.trained: dict[str, ModelRows] = {}
        for model in chunk.objective.trained:
            before = self.models[model]
            after = ModelRows(new_rows(before.parameters), new_rows(before.statistics))
            live = ModelRows(client.row(model).data, client.statistics(model).data)
            self.places += [
                _Place(model, live.parameters, before.parameters, after.parameters),
                _Place(model, live.statistics, before.statistics, after.statistics),
            ]
            self.trained[model] = after
        # such as how many batches BatchNorm has seen: no row holds it
        buffers = [buffer for buffer in client.buffers() if not buffer.is_floating_point()]
        for model in chunk.objective.trained:
            buffers += buffers_outside_rows(client.model(model)).values()
        unkept = {id(buffer): buffer for buffer in buffers}
        self.counters = [(buffer, buffer.clone()) for buffer in unkept.values()]

    def load(self, position: int) -> None:
        """Make the models those of a client."""
        for place in self.places:
            place.live.copy_(place.before[position])
        self.restore_counters()

    def restore_counters(self) -> None:
        """Put buffers that no row holds back to what they were before the first client."""
        for buffer, value in self.counters:
            buffer.copy_(value)

    def keep(self, model: str, position: int) -> None:
        """Write one of them into the client's new rows."""
        for place in self.places:
            if place.model == model:
                place.after[position].copy_(place.live)

    def hand_over(self) -> None:
        """Replace the chunk's models by the trained ones."""
        self.models.update(self.trained)


@dataclass(frozen=True)
class _Place:
    """A live row of one model, and the clients' rows before and after the local steps."""

    model: str
    live: Tensor
    before: Tensor
    after: Tensor
