"""Check that clients can be stacked, by types and by a trial on their first minibatches."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.engine.base import CannotStackError, Chunk, LocalSettings
from pl_fed.engine.batched import PreparedStep, StackedRunner, StepInputs, drop_unsupported_mask
from pl_fed.engine.step import have_same_gradients
from pl_fed.nets.calls import READS_OWN_WEIGHTS
from pl_fed.nets.modes import BATCH_NORMS
from pl_fed.nets.own_buffers import restore_buffers
from pl_fed.optimizers import BoxSGD
from pl_fed.random import fork_all_generators, fork_torch_rng, read_global_state
from pl_fed.text import describe_error
from pl_fed.trees import leaves, tree_map
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
    BoxSGD,
)
"""Optimizers that update each number independently, so that stacked clients do not mix."""

_OTHER_WEIGHTS = 0.75  # factor of the weights at which gradients are compared
_MANY_ROUNDS = 1000  # of a run without a number of rounds


def check_stackable(
    client: Client,
    optimizer: torch.optim.Optimizer,
    chunk: Chunk,
    settings: LocalSettings,
) -> None:
    """Check that clients can be stacked; try the objective without training.

    Args:
        client: The algorithm.
        optimizer: The local optimizer.
        chunk: A few clients for the trial.
        settings: Mixed precision, gradient clipping and accumulation.

    Raises:
        CannotStackError: If the optimizer mixes the numbers of a tensor, the net mixes the samples
            of a minibatch or changes a buffer, ``torch.vmap`` does not support the objective, or
            the loss depends on masked samples.
    """
    _check_types(client, chunk.objective.trained, optimizer)
    batches = chunk.batches
    if batches.data.own_batches is not None:
        raise CannotStackError(
            "a batch of the data set's own may have any type, and only its client's step reads it"
        )
    if not client.averages_samples and not batches.rule.is_uniform(batches.data.train.sizes):
        raise CannotStackError(
            f"{client.task.name} is not the mean of sample losses,"
            " and the clients' minibatches have several sizes"
        )
    try:
        with _note_rounds(client) as reads:
            _try_stack(client, optimizer, chunk, settings)
    except (CannotStackError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # an error with another cause will occur again one by one
        raise CannotStackError(describe_error(error)) from error
    if not reads:
        return
    with fork_all_generators(client.device), _note_rounds(client, pretends_last=True):
        drawn = read_global_state()
        try:  # a step may have a part for later rounds
            _try_stack(client, optimizer, chunk, settings)
        except torch.OutOfMemoryError:
            raise
        except CannotStackError:
            # a step that draws has other gradients in each call, and the later round warns of it
            if read_global_state() == drawn:
                raise
        except Exception:  # such a round may need values of earlier ones
            return


@contextmanager
def _note_rounds(client: Client, pretends_last: bool = False) -> Iterator[list[str]]:
    """Yield a list of the trainer's counters of rounds; it grows whenever a step reads one.

    Args:
        client: The algorithm.
        pretends_last: Whether the steps read the number of the last round.
    """
    reads: list[str] = []

    def lend(name: str, number: int) -> property:
        """Return a counter of a trainer."""

        def read(_: Any) -> int:
            """Note a read."""
            reads.append(name)
            return number

        return property(read)

    with ExitStack() as patches:
        with suppress(RuntimeError):  # the client has no trainer
            trainer = client.trainer
            rounds = getattr(trainer, "max_epochs", None) or _MANY_ROUNDS
            last = (rounds if rounds > 0 else _MANY_ROUNDS) - 1
            for name in {"current_epoch", "global_step"} & {*dir(type(trainer))}:
                number = last if pretends_last else getattr(trainer, name)
                patch = mock.patch.object(type(trainer), name, lend(name, number))
                patches.enter_context(patch)
        yield reads


def _try_stack(
    client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk, settings: LocalSettings
) -> None:
    """Try a step of a stack.

    Raises:
        CannotStackError: If it computes something else than the steps of single clients.
        Exception: If it fails.
    """
    forked, noted = fork_torch_rng(client.device), _note_autocast()
    with forked, restore_buffers(client) as changed, noted as casts, torch.no_grad():
        step = _prepare_step(client, optimizer, chunk, settings)
        inputs = StepInputs(step, optimizer, chunk)
        loss, *other_losses = _compute_losses(step, inputs, chunk)
        first = inputs.build_stack(0, _load_first(step, chunk))
        reads_own = step.step.reads_own_weights(step.buffers.state, first)
        agrees = settings.casts(client.device) or _agrees_with_one(step, first)
    if changed:
        raise CannotStackError(f"training changes a buffer of the net ({changed[0]})")
    if not all(torch.allclose(loss, other, rtol=1e-3, equal_nan=True) for other in other_losses):
        raise CannotStackError("the loss of `training_step` depends on masked samples")
    if casts and not settings.casts(client.device):
        raise CannotStackError("a step enters torch.autocast, and torch.vmap would bypass it")
    if reads_own:
        raise CannotStackError(READS_OWN_WEIGHTS)
    if not agrees:
        raise CannotStackError("a stack has other gradients than its first client alone")


@contextmanager
def _note_autocast() -> Iterator[list[str]]:
    """Yield a list of the devices of all autocasts within the context; it grows with them."""
    casts: list[str] = []
    enter = torch.autocast.__enter__

    def enter_and_note(context: torch.autocast) -> Any:
        result = enter(context)
        if torch.is_autocast_enabled(context.device):
            casts.append(context.device)
        return result

    with mock.patch.object(torch.autocast, "__enter__", enter_and_note):
        yield casts


def _prepare_step(
    client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk, settings: LocalSettings
) -> PreparedStep:
    """Return the step of a stack of all clients of a chunk, with their models and rows."""
    rows = chunk.round.readable_rows()
    step = StackedRunner(settings, len(chunk.clients)).prepare(client, optimizer, chunk, rows)
    step.buffers.load(chunk.round.models, rows)
    return step


def _load_first(step: PreparedStep, chunk: Chunk) -> Batch:
    """Return the first minibatches of a stack's clients."""
    return drop_unsupported_mask(step.client, chunk.batches.stack_step(0))


def _agrees_with_one(step: PreparedStep, inputs: dict[str, Any]) -> bool:
    """Return whether a stack has the gradients of its first client alone, at other weights.

    A backward pass that reads the module, as a hook of a tensor may, reads the module's own weights
    in a stack. The step's weights change.
    """
    for group in step.buffers.leaves.values():
        for leaf in group.values():
            leaf.mul_(_OTHER_WEIGHTS)
    stacked, _ = step.step.gradients(step.buffers.state, inputs)
    alone = step.step.backward_gradients(step.buffers.state, inputs)
    first = {model: {n: rows[0] for n, rows in group.items()} for model, group in stacked.items()}
    return have_same_gradients(first, alone)


def measure_saved_bytes(
    client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk, settings: LocalSettings
) -> int:
    """Return the bytes that a step of one client keeps for its backward pass; 0 if unknown.

    An objective that differentiates by ``torch.func`` cannot be watched.

    Args:
        client: The algorithm.
        optimizer: The local optimizer.
        chunk: A few clients that can be stacked; the bytes are those of a stack, divided.
        settings: Mixed precision, gradient clipping and accumulation.
    """
    with (
        suppress(Exception),
        fork_torch_rng(client.device),
        restore_buffers(client),
        torch.no_grad(),
        _count_saved_bytes() as saved,
    ):
        step = _prepare_step(client, optimizer, chunk, settings)
        inputs = StepInputs(step, optimizer, chunk)
        step.compute_outputs(inputs.build_stack(0, _load_first(step, chunk)))
        return max(saved) // len(chunk.clients)
    return 0


@contextmanager
def _count_saved_bytes() -> Iterator[list[int]]:
    """Yield the bytes of the tensors that autograd keeps for a backward pass, as they grow."""
    storages: dict[int, int] = {}
    totals = [0]

    def note(tensor: Tensor) -> Tensor:
        """Count the memory of a tensor once."""
        with suppress(RuntimeError, NotImplementedError):  # a traced tensor has no memory
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            totals.append(sum(storages.values()))
        return tensor

    def release(tensor: Tensor) -> Tensor:
        """Begin a new count: the backward pass frees the tensors."""
        storages.clear()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, release):
        yield totals


def _check_types(
    client: Client, trained: tuple[str, ...], optimizer: torch.optim.Optimizer
) -> None:
    """Refuse types of optimizers and layers that do not stack."""
    if type(optimizer) not in ELEMENTWISE:
        raise CannotStackError(
            f"it is unknown whether {type(optimizer).__name__} updates each number independently"
        )
    for model in trained:
        for name, layer in client.model(model).named_modules():
            mixes = isinstance(layer, BATCH_NORMS) and (
                layer.training or layer.running_mean is None
            )
            if mixes or getattr(layer, "scale_grad_by_freq", False):
                raise CannotStackError(
                    f"{type(layer).__name__} ({name}) mixes the samples of a minibatch"
                )


def _compute_losses(step: PreparedStep, inputs: StepInputs, chunk: Chunk) -> list[Tensor]:
    """Return the losses of the first minibatches with two different paddings and without padding.

    Without padding, a dropout layer draws other numbers if samples are not its first dimension.
    """
    if not step.client.averages_samples:
        return [step.compute_outputs(inputs.build_stack(0, _load_first(step, chunk)))["loss"]]
    padded, padded_otherwise = _pad_last_sample(chunk)
    losses = [
        step.compute_outputs(inputs.build_stack(0, batch))["loss"]
        for batch in (padded, padded_otherwise)
    ]
    width = leaves(padded.targets)[0].shape[1] - 1
    if width and step.client.draws.wanted and not step.step.casts:  # a trace is for one shape
        shorter = tree_map(lambda leaf: leaf[:, :-1], padded)
        losses.append(step.compute_outputs(inputs.build_stack(0, shorter, width))["loss"])
    return losses


def _pad_last_sample(chunk: Chunk) -> tuple[Batch, Batch]:
    """Return the first minibatches with a masked last sample: their own, or their first again."""
    batch = chunk.batches.stack_step(0)
    mask = cast(Tensor, batch.mask).clone()
    mask[:, -1] = False
    inputs = tree_map(_repeat_first_sample, batch.inputs)
    targets = tree_map(_repeat_first_sample, batch.targets)
    return batch._replace(mask=mask), batch._replace(inputs=inputs, targets=targets, mask=mask)


def _repeat_first_sample(leaf: Tensor) -> Tensor:
    """Return minibatches with their first sample in place of the last one."""
    leaf = leaf.clone()
    leaf[:, -1] = leaf[:, 0]
    return leaf
