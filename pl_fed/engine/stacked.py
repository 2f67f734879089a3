"""Many clients at once: parameters with a leading client dimension, under ``torch.vmap``."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pl_fed.clients.base import Client
from pl_fed.engine.base import Chunk, Engine, as_outputs
from pl_fed.functional.rows import running_statistics
from pl_fed.types import Batch

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)
"""Optimizers that treat every number by itself, so that stacked clients do not mix."""


class CannotStackError(RuntimeError):
    """A net, an optimizer or an objective that ``torch.vmap`` does not take."""


class Stacked(Engine):
    """Runs the clients of a chunk as one stack; they see the same numbers as one by one.

    Clients of unequal size get masked batches; one that has done its steps stands still.
    """

    def run(
        self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> dict[str, Tensor]:
        """Train the chunk's rows in place: see :meth:`Engine.run`.

        Raises:
            CannotStackError: If this client cannot be run in a stack; rows are then as before.
        """
        check_stackable(client, optimizer)
        rows = {model: chunk.rows[model].contiguous() for model in client.trains}
        leaves = {
            model: {
                name: view.detach().requires_grad_()
                for name, view in client.row(model).layout.views(rows[model]).items()
            }
            for model in client.trains
        }
        stacked = client.build_optimizer({m: list(group.values()) for m, group in leaves.items()})
        for group, live in zip(stacked.param_groups, optimizer.param_groups):
            group.update({name: value for name, value in live.items() if name != "params"})
        totals: dict[str, Tensor] = {}
        counts = torch.tensor(chunk.batches.steps, device=client.device)
        centres = _Centres(client, chunk)
        for step in range(chunk.batches.max_steps):
            stacked.zero_grad()
            outputs = self._outputs(client, leaves, chunk, centres, step)
            outputs["loss"].sum().backward()
            if self.clipping.value:
                for models in leaves.values():
                    self._clip(list(models.values()))
            still = _StandStill(rows, chunk.steps, step)
            stacked.step()
            still.restore()
            running = counts > step
            for name, value in outputs.items():
                value = torch.where(running, value.detach(), 0)
                totals[name] = totals[name] + value if name in totals else value
        for model, trained in rows.items():
            chunk.rows[model] = trained
        return {name: total / counts for name, total in totals.items()}

    def _outputs(
        self,
        client: Client,
        leaves: Mapping[str, Mapping[str, Tensor]],
        chunk: Chunk,
        centres: "_Centres",
        step: int,
    ) -> dict[str, Tensor]:
        batch = chunk.batches.at(step)
        keys = [chunk.draw_key(position, step) for position in range(len(chunk.clients))]
        draws = torch.tensor(keys, dtype=torch.int64, device=batch.x.device)
        try:
            with self.autocast():
                return _objectives(client, leaves, batch, draws, centres, step)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            if step > 0 or isinstance(error, torch.OutOfMemoryError):
                raise
            raise CannotStackError(str(error).strip().splitlines()[0]) from error

    def _clip(self, leaves: list[Tensor]) -> None:
        value = self.clipping.value or 0.0
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        if self.clipping.algorithm == "value":
            for gradient in gradients:
                gradient.clamp_(-value, value)
            return
        norms = [torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        factor = (value / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for gradient in gradients:
            gradient.mul_(factor.view(-1, *([1] * (gradient.dim() - 1))))


class _Step(nn.Module):
    """A client whose forward is ``training_step``: what ``functional_call`` can swap tensors in."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.client = client

    def forward(self, batch: Batch, step: int) -> dict[str, Tensor]:
        return as_outputs(self.client.training_step(batch, step))


class _Centres:
    """What models are pulled to, as named views; those that are a client's own are stacked."""

    def __init__(self, client: Client, chunk: Chunk) -> None:
        layout = client.row(client.trains[0]).layout
        rows = {
            name: row
            for name, row in chunk.centres(client.trains).items()
            if row.shape[-1] == layout.numel
        }
        self.views = {name: layout.views(row) for name, row in rows.items()}
        self.in_dims = {name: None if row.dim() == 1 else 0 for name, row in rows.items()}


def _objectives(
    client: Client,
    leaves: Mapping[str, Mapping[str, Tensor]],
    batch: Batch,
    keys: Tensor,
    centres: _Centres,
    step: int,
) -> dict[str, Tensor]:
    """Return what ``training_step`` gives for every client of the stack, each [clients]."""
    module = _Step(client)

    def one(
        parameters: dict[str, Tensor], batch: Batch, key: Tensor, views: dict[str, Any]
    ) -> dict[str, Tensor]:
        client.draws.key = key
        client.centres = views
        return functional_call(module, parameters, (batch, step))  # type: ignore[no-any-return]

    parameters = {
        f"client.{model}_model.{name}": leaf
        for model, group in leaves.items()
        for name, leaf in group.items()
    }
    try:
        stacked = torch.vmap(one, in_dims=(0, 0, 0, centres.in_dims), randomness="error")
        result: dict[str, Tensor] = stacked(parameters, batch, keys, centres.views)
        return result
    finally:
        client.draws.key = 0
        client.centres = {}


class _StandStill:
    """Keeps the rows of clients that have done their steps, while the optimizer moves all."""

    def __init__(self, rows: Mapping[str, Tensor], steps: dict[str, list[int]], step: int) -> None:
        self.rows = rows
        self.kept: dict[str, tuple[Tensor, Tensor]] = {}
        for model, row in rows.items():
            done = [position for position, count in enumerate(steps[model]) if step >= count]
            if done:
                index = torch.tensor(done, device=row.device)
                self.kept[model] = (index, row[index])

    def restore(self) -> None:
        """Put back what must not have moved."""
        for model, (index, before) in self.kept.items():
            self.rows[model][index] = before


def check_stackable(client: Client, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what is known not to stack.

    Raises:
        CannotStackError: If the optimizer mixes the numbers of a tensor, or the net keeps running
            statistics.
    """
    if type(optimizer) not in ELEMENTWISE:
        raise CannotStackError(
            f"{type(optimizer).__name__} is not known to treat every number by itself"
        )
    for model in client.trains:
        names = list(running_statistics(client.model(model)))
        if names:
            raise CannotStackError(f"the net keeps running statistics ({names[0]})")
