"""Many clients at once: parameters with a leading client dimension, under ``torch.vmap``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ModelRows
from pl_fed.engine.base import Chunk, new_rows
from pl_fed.engine.program import Program
from pl_fed.engine.step import options_of
from pl_fed.engine.stepping import Outside, Stepping, filled
from pl_fed.random import fork_torch_rng
from pl_fed.trees import Tree, leaves, tree_map
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

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class CannotStackError(RuntimeError):
    """A net, an optimizer or an objective that cannot be run for many clients at once."""


class Stacked(Stepping):
    """Runs the clients of a chunk as one stack; they see the same numbers as one by one.

    Clients of unequal size get masked batches; one that has done its steps stands still. A compiled
    stack is always of the same size; where there are fewer clients, places stay empty.
    """

    def check(self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk) -> None:
        """Try the objective on the first minibatches, without training.

        Raises:
            CannotStackError: If ``torch.vmap`` does not take it, or what is masked counts in it.
        """
        check_stackable(client, chunk.objective.trained, optimizer)
        batches = chunk.batches
        if not client.averages_samples and not batches.rule.is_uniform(batches.data.train.sizes):
            raise CannotStackError(
                f"{client.task.name} is not the mean of one loss for each sample,"
                " and clients' minibatches are of several sizes"
            )
        buffers = {name: (buffer, buffer.clone()) for name, buffer in client.named_buffers()}
        try:
            with fork_torch_rng(client.device):
                one, *others = self._losses(client, optimizer, chunk)
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
        if not all(torch.allclose(one, other, rtol=1e-3, equal_nan=True) for other in others):
            raise CannotStackError(
                "samples that `batch.mask` leaves out change what `training_step` returns"
            )

    def run_steps(
        self,
        program: Program,
        optimizer: torch.optim.Optimizer,
        chunk: Chunk,
        rows: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Run the chunk's steps."""
        batches, models, number = chunk.batches, chunk.round.models, len(chunk.clients)
        program.load(models, rows)
        ends, each_step = self._inputs(program, optimizer, chunk)
        outside = Outside.of(program, optimizer)
        for step in range(batches.max_steps):
            batch = _as_the_criterion_takes(program.client, batches.at(step))
            gradients = program(each_step(step, batch), whole=True)
            if outside is not None:
                done = {model: _done(steps, step) for model, steps in chunk.steps.items()}
                outside.step(gradients, done)
        trained = {  # nets whose running statistics change are not stacked
            model: ModelRows(new_rows(models[model].parameters), models[model].statistics)
            for model in chunk.objective.trained
        }
        program.write(trained)
        models.update(trained)
        chunk.on_done(number)
        return {name: total[:number] / ends[-1] for name, total in program.totals.items()}

    def _inputs(
        self, program: Program, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> tuple[Tensor, Callable[..., dict[str, Any]]]:
        """Return each model's steps [models + 1, clients], and what makes a step's inputs."""
        device, steps, size = program.client.device, chunk.batches.max_steps, program.size or 0
        options = options_of(optimizer, program.example)
        index = torch.arange(steps, device=device)
        ends = torch.tensor([*chunk.steps.values(), chunk.batches.steps], device=device)
        running = index[:, None, None] < filled(ends, (len(ends), size))
        draws = filled(chunk.draw_keys(program.client.draws).to(device), (size, steps))

        def inputs(step: int, batch: Batch, width: int = chunk.batches.width) -> dict[str, Any]:
            shape = (size, width)
            return {
                **{
                    name: tree_map(lambda leaf: filled(leaf, shape), each)
                    for name, each in batch._asdict().items()
                    if each is not None
                },
                "index": index[step] if program.step.traced else step,
                "draw": draws[:, step],
                "rows": program.rows,
                "running": running[step],
                "options": options[step > 0],
            }

        return ends, inputs

    def _losses(
        self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> list[Tensor]:
        """Return the losses of the first minibatches, with one padding, with another, and without.

        Without any, a dropout layer draws others if samples are not its first dimension.
        """
        rows = chunk.round.readable()
        program = self.program(client, optimizer, chunk, rows)
        with torch.no_grad():
            program.load(chunk.round.models, rows)
            _, inputs = self._inputs(program, optimizer, chunk)
            if not client.averages_samples:
                batch = _as_the_criterion_takes(client, chunk.batches.at(0))
                return [program.outputs(inputs(0, batch))["loss"]]
            one, other = _padded(chunk)
            found = [program.outputs(inputs(0, batch))["loss"] for batch in (one, other)]
            width = leaves(one.targets)[0].shape[1] - 1
            if width and client.draws.wanted and not program.step.casts:  # traced for one shape
                tensors = {name: each for name, each in one._asdict().items() if each is not None}
                short = one._replace(
                    **{name: _without_last(each) for name, each in tensors.items()}
                )
                found.append(program.outputs(inputs(0, short, width))["loss"])
        return found


def _as_the_criterion_takes(client: Client, batch: Batch) -> Batch:
    """Return minibatches without a mask if the criterion takes no padding: there is none, then.

    Only clients that stand still have samples that do not count.
    """
    return batch if client.averages_samples else batch._replace(mask=None)


def _done(steps: list[int], step: int) -> list[int]:
    return [position for position, count in enumerate(steps) if step >= count]


def check_stackable(
    client: Client, trained: tuple[str, ...], optimizer: torch.optim.Optimizer
) -> None:
    """Refuse what is known not to stack.

    Args:
        client: The algorithm.
        trained: Names of the models that are trained.
        optimizer: The local optimizer.

    Raises:
        CannotStackError: If the optimizer mixes the numbers of a tensor, or the net the samples of
            a minibatch.
    """
    if type(optimizer) not in ELEMENTWISE:
        raise CannotStackError(
            f"{type(optimizer).__name__} is not known to treat every number by itself"
        )
    for model in trained:
        for name, layer in client.model(model).named_modules():
            mixes = isinstance(layer, _BATCH_NORMS) and (
                layer.training or layer.running_mean is None
            )
            if mixes or getattr(layer, "scale_grad_by_freq", False):
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
    inputs, targets = (tree_map(_first_again, tree) for tree in (batch.inputs, batch.targets))
    return batch._replace(mask=mask), batch._replace(inputs=inputs, targets=targets, mask=mask)


def _without_last(tree: Tree) -> Tree:
    """Return minibatches without their last sample."""
    return tree_map(lambda leaf: leaf[:, :-1], tree)


def _first_again(leaf: Tensor) -> Tensor:
    """Return minibatches whose last sample is their first."""
    leaf = leaf.clone()
    leaf[:, -1] = leaf[:, 0]
    return leaf
