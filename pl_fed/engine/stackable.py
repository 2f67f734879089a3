"""Whether clients can be stacked: known from types, and tried on their first minibatches."""

import torch
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.engine.base import CannotStackError, Chunk, LocalSettings, restored
from pl_fed.engine.batched import BatchedRunner, StepInputs, unpadded_as_needed
from pl_fed.random import fork_torch_rng
from pl_fed.text import first_line
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


def check_stackable(
    client: Client,
    optimizer: torch.optim.Optimizer,
    chunk: Chunk,
    settings: LocalSettings,
    size: int,
) -> None:
    """Check that clients can be stacked; try the objective without training.

    Args:
        client: The algorithm.
        optimizer: The local optimizer.
        chunk: Some clients.
        settings: How every local step is computed.
        size: How many clients are stacked.

    Raises:
        CannotStackError: If the optimizer mixes the numbers of a tensor, the net mixes the samples
            of a minibatch, ``torch.vmap`` does not take the objective, or its value depends on
            masked samples.
    """
    _check_types(client, chunk.objective.trained, optimizer)
    batches = chunk.batches
    if not client.averages_samples and not batches.rule.is_uniform(batches.data.train.sizes):
        raise CannotStackError(
            f"{client.task.name} is not the mean of one loss for each sample,"
            " and clients' minibatches are of several sizes"
        )
    try:
        with fork_torch_rng(client.device), restored(dict(client.named_buffers())) as changed:
            first, *others = _losses(client, optimizer, chunk, BatchedRunner(settings, size))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an error that has another cause will come again one by one
        raise CannotStackError(first_line(error)) from error
    if changed:
        raise CannotStackError(f"training changes a buffer of the net ({changed[0]})")
    if not all(torch.allclose(first, other, rtol=1e-3, equal_nan=True) for other in others):
        raise CannotStackError(
            "samples that `batch.mask` leaves out change what `training_step` returns"
        )


def _check_types(
    client: Client, trained: tuple[str, ...], optimizer: torch.optim.Optimizer
) -> None:
    """Refuse types of optimizers and layers that do not stack."""
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


def _losses(
    client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk, runner: BatchedRunner
) -> list[Tensor]:
    """Return the losses of the first minibatches, with one padding, with another, and without.

    Without padding, a dropout layer draws other numbers if samples are not its first dimension.
    """
    rows = chunk.round.readable()
    step = runner.prepare(client, optimizer, chunk, rows)
    with torch.no_grad():
        step.buffers.load(chunk.round.models, rows)
        inputs = StepInputs(step, optimizer, chunk)
        if not client.averages_samples:
            batch = unpadded_as_needed(client, chunk.batches.stack_step(0))
            return [step.outputs(inputs.of_stack(0, batch))["loss"]]
        padded, otherwise = _padded(chunk)
        losses = [step.outputs(inputs.of_stack(0, batch))["loss"] for batch in (padded, otherwise)]
        width = leaves(padded.targets)[0].shape[1] - 1
        if width and client.draws.wanted and not step.step.casts:  # traced for one shape
            trees = padded._asdict().items()
            shorter = padded._replace(
                **{name: _without_last(tree) for name, tree in trees if tree is not None}
            )
            losses.append(step.outputs(inputs.of_stack(0, shorter, width))["loss"])
    return losses


def _padded(chunk: Chunk) -> tuple[Batch, Batch]:
    """Return the first minibatches with their last sample as padding, in two versions."""
    batch = chunk.batches.stack_step(0)
    if batch.mask is None:
        raise TypeError("Expected stacked minibatches to have a mask but got None.")
    mask = batch.mask.clone()
    mask[:, -1] = False
    inputs, targets = (tree_map(_repeat_first, tree) for tree in (batch.inputs, batch.targets))
    return batch._replace(mask=mask), batch._replace(inputs=inputs, targets=targets, mask=mask)


def _without_last(tree: Tree) -> Tree:
    """Return minibatches without their last sample."""
    return tree_map(lambda leaf: leaf[:, :-1], tree)


def _repeat_first(leaf: Tensor) -> Tensor:
    """Return minibatches whose last sample is their first."""
    leaf = leaf.clone()
    leaf[:, -1] = leaf[:, 0]
    return leaf
