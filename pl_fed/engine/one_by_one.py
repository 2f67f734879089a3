"""One client after the other, on the client's own modules: what a hand-written loop does."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.engine.base import Chunk, Engine, as_outputs, built_anew, new_rows
from pl_fed.functional.random import key, seeded_torch
from pl_fed.functional.rows import unkept_buffers


class OneByOne(Engine):
    """Runs the clients of a chunk in turn, eagerly. It takes any net and any optimizer."""

    def run(
        self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> dict[str, Tensor]:
        """Train the chunk's rows: see :meth:`Engine.run`."""
        batches, models = chunk.batches, _LiveModels(client, chunk)
        leaves = {model: list(client.row(model).tensors.values()) for model in client.trains}
        centres = chunk.centres(client.trains)
        keys: list[list[int]] = chunk.draw_keys(client.draws).tolist()
        outputs = []
        with seeded_torch(client.device) as seed:
            for position, one in enumerate(batches.clients):
                seed(key(batches.seed, "torch", batches.round, one))
                models.load(position)
                client.centres = {
                    name: row if row.dim() == 1 else row[position] for name, row in centres.items()
                }
                anew = built_anew(client, optimizer, leaves)
                outputs.append(self._steps(client, anew, chunk, models, position, keys[position]))
                chunk.on_done(position + 1)
        models.hand_over()
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
        self.places: list[_Place] = []
        for model in client.trains:
            self._add(model, client.row(model).data, chunk.rows)
            if model in chunk.statistics:
                self._add(model, client.statistics(model).data, chunk.statistics)
        # such as how many batches BatchNorm has seen: no row holds it
        unkept = {id(each): each for each in client.buffers() if not each.is_floating_point()}
        for model in client.trains:
            unkept |= {id(each): each for each in unkept_buffers(client.model(model)).values()}
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
        """Exchange the chunk's rows for the new ones."""
        for place in self.places:
            place.rows[place.model] = place.after

    def _add(self, model: str, live: Tensor, rows: dict[str, Tensor]) -> None:
        self.places.append(_Place(model, live, rows[model], new_rows(rows[model]), rows))


@dataclass(frozen=True)
class _Place:
    """A live row of one model, the clients' rows before and after, and where these belong."""

    model: str
    live: Tensor
    before: Tensor
    after: Tensor
    rows: dict[str, Tensor]
