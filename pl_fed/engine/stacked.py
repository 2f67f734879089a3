"""Many clients at once: parameters with a leading client dimension, under ``torch.vmap``."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from pl_fed.clients.base import Client
from pl_fed.engine.base import Chunk, Engine, built_anew, new_rows
from pl_fed.engine.objective import Objective
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
    """A net, an optimizer or an objective that cannot be run for many clients at once."""


class Stacked(Engine):
    """Runs the clients of a chunk as one stack; they see the same numbers as one by one.

    Clients of unequal size get masked batches; one that has done its steps stands still.
    """

    def check(self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk) -> None:
        """Try the objective on the first minibatches, without training.

        Raises:
            CannotStackError: If ``torch.vmap`` does not take it, or what is masked counts in it.
        """
        check_stackable(client, optimizer)
        with self.autocast():
            if torch.is_autocast_enabled(client.device.type):
                raise CannotStackError("mixed precision has no effect under torch.vmap")
        buffers = {name: (buffer, buffer.clone()) for name, buffer in client.named_buffers()}
        try:
            stack = _Stack(client, chunk)
            with self.autocast():
                one, other = (stack.objectives(each, 0)["loss"] for each in _padded(chunk))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # if it is not the stacking, it will come again one by one
            first, *_ = str(error).strip().splitlines() or [type(error).__name__]
            raise CannotStackError(first.rstrip(".")) from error
        finally:
            changed = [name for name, (buffer, kept) in buffers.items() if not kept.equal(buffer)]
            for buffer, kept in buffers.values():
                buffer.copy_(kept)
        if changed:
            raise CannotStackError(f"training changes a buffer of the net ({changed[0]})")
        if not torch.allclose(one, other, rtol=1e-3, equal_nan=True):
            raise CannotStackError(
                "samples that `batch.mask` leaves out change what `training_step` returns"
            )

    def run(
        self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> dict[str, Tensor]:
        """Train the chunk's rows in place: see :meth:`Engine.run`."""
        stack = _Stack(client, chunk)
        leaves = {model: list(group.values()) for model, group in stack.leaves.items()}
        anew = built_anew(client, optimizer, leaves)
        totals: dict[str, Tensor] = {}
        counts = torch.tensor(chunk.batches.steps, device=client.device)
        for step in range(chunk.batches.max_steps):
            anew.zero_grad()
            batch = chunk.batches.at(step)
            with self.autocast():
                outputs = stack.objectives(batch, step)
            outputs["loss"].sum().backward()
            for parameters in leaves.values():
                self._clip(parameters)
            still = _StandStill(stack.rows, chunk.steps, step)
            anew.step()
            still.restore()
            running = counts > step
            for name, value in outputs.items():
                value = torch.where(running, value.detach(), 0)
                totals[name] = totals[name] + value if name in totals else value
        chunk.rows.update(stack.rows)
        chunk.on_done(len(chunk.clients))
        return {name: total / counts for name, total in totals.items()}

    def _clip(self, leaves: list[Tensor]) -> None:
        value = self.clipping.value
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        if not value or not gradients:
            return
        if self.clipping.algorithm == "value":
            for gradient in gradients:
                gradient.clamp_(-value, value)
            return
        norms = [torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        factor = (value / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for gradient in gradients:
            gradient.mul_(factor.view(-1, *([1] * (gradient.dim() - 1))))


class _Stack:
    """The clients of a chunk as one: their rows, and the parameters that are views on them."""

    def __init__(self, client: Client, chunk: Chunk) -> None:
        self.objective = Objective(client)
        self.rows = {model: new_rows(chunk.rows[model]) for model in client.trains}
        for model, row in self.rows.items():
            row.copy_(chunk.rows[model])
        self.leaves = {
            model: {
                name: view.detach().requires_grad_()
                for name, view in client.row(model).layout.views(row).items()
            }
            for model, row in self.rows.items()
        }
        self.keys = chunk.draw_keys(client.draws).to(client.device)
        layout = client.row(client.trains[0]).layout
        centres = chunk.centres_like(layout, client.trains)
        self.centres = {name: layout.views(row) for name, row in centres.items()}
        self.centre_dims = {name: None if row.dim() == 1 else 0 for name, row in centres.items()}

    def objectives(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """Return what ``training_step`` gives for every client, each [clients]."""
        draws, dims = self.keys[:, step], self.centre_dims
        return self.objective.stacked(self.leaves, batch, step, draws, self.centres, dims)


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
        CannotStackError: If the optimizer mixes the numbers of a tensor, or the net the samples of
            a minibatch.
    """
    if type(optimizer) not in ELEMENTWISE:
        raise CannotStackError(
            f"{type(optimizer).__name__} is not known to treat every number by itself"
        )
    for model in client.trains:
        for name, layer in client.model(model).named_modules():
            if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
                raise CannotStackError(
                    f"{type(layer).__name__} ({name}) mixes the samples of a minibatch"
                )


def _padded(chunk: Chunk) -> tuple[Batch, Batch]:
    """The first minibatches without their last sample, with one padding and with another."""
    batch = chunk.batches.at(0)
    if batch.mask is None:
        raise TypeError("Expected stacked minibatches to have a mask but got None.")
    mask = batch.mask.clone()
    mask[:, -1] = False
    x, y = batch.x.clone(), batch.y.clone()
    x[:, -1], y[:, -1] = x[:, 0], y[:, 0]
    return batch._replace(mask=mask), batch._replace(x=x, y=y, mask=mask)
