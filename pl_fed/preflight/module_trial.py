"""A trial of a LightningModule's steps before training, on a few samples."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from pl_fed.clients.base import Client
from pl_fed.clients.kept_parts import module_parts, trainer_parts
from pl_fed.clients.optimizer_options import OptionGuard
from pl_fed.engine.base import TAKEN_NUMBERS, name_clients
from pl_fed.metrics.client_metrics import (
    STANDARD_ERROR,
    STATISTICS,
    TAKEN_NAMES,
    TRAINED_STATISTICS,
)
from pl_fed.nets.kept_values import Changes, KeptValues, Part, ValueGuard
from pl_fed.nets.modes import evaluation_mode, list_shortened_weights, training_mode
from pl_fed.preflight.explanations import call_or_explain
from pl_fed.preflight.step_rules import (
    describe_lasting_metrics,
    describe_outside_values,
    describe_read,
    describe_restored_numbers,
    refuse_evaluation_changes,
)
from pl_fed.preflight.trial import Trial, lend_optimizer
from pl_fed.random import fork_torch_rng
from pl_fed.tasks import LightningTask
from pl_fed.tasks.base import SkippedStepError
from pl_fed.tasks.directions import Directions, guess_direction
from pl_fed.tasks.lightning_task import choose_stage
from pl_fed.tasks.module_facts import ModuleFacts
from pl_fed.tasks.module_steps import list_skipped_hooks
from pl_fed.tasks.own_batches import OwnBatches
from pl_fed.tasks.step_logs import StepLogs, name_metrics
from pl_fed.tasks.trainer_stages import METRICS, note_reads, trainer_stage
from pl_fed.text import quote
from pl_fed.trees import describe, read_versions
from pl_fed.types import Batch

_REMEDIES = {
    "`self.log()`": (
        ": pl_fed records `self.log` of the module that it calls, not a method kept from `__init__`"
        " or that of a LightningModule within: log in the steps of the outer module"
    ),
    "trainer.optimizers": ": the trainer has no local optimizers, so call `self.optimizers()`",
    "trainer.lr_scheduler_configs": (
        ": the trainer has no local schedules, so call `self.lr_schedulers()`"
    ),
    "trainer.train_dataloader": (
        ": the trainer has a dataloader of clients, in training only, so give the module the number"
        " of its minibatches as an argument"
    ),
    "trainer.callback_metrics": (
        ": the trainer has metrics over clients, such as `val/global/loss`, so compute the client's"
        " own in the module"
    ),
    "'FederatedData' object has no attribute": (
        ": `self.trainer.datamodule` is that of pl_fed, and that of LightningData is"
        " `self.trainer.datamodule.dataset.datamodule`"
    ),
}
"""Ends of errors in a step, by words in the error or in the line that raised it."""


def find_module_facts(
    trial: Trial, task: LightningTask, optimizer: torch.optim.Optimizer
) -> tuple[Trial, ModuleFacts]:
    """Run the steps of a module on a few samples, and find the names of its metrics.

    The trial runs on copies of the module and of the task, in evaluation mode.

    Args:
        trial: The algorithm and its samples.
        task: The task of the algorithm.
        optimizer: The local optimizer, for steps that read it.

    Returns:
        The trial with inputs as the module takes them, and the facts. The names are those of all
        logs in the evaluation of both parts.

    Raises:
        ValueError: If a step fails, or logs values with a reserved name.
    """
    client, net = trial.client, _copy(trial.client, optimizer)
    name = type(net).__name__
    with fork_torch_rng(client.device), evaluation_mode(net):
        trial, facts = _find_training_facts(net, task, trial)
        owners = [*module_parts(net), *trainer_parts(client)]
        task_copy = _copy_task(task, facts)
        parts, shared = _try_evaluations(net, task_copy, trial, owners, optimizer)
    facts = replace(facts, shared_values=shared)
    facts = _add_evaluation_facts(task, facts, parts)
    _check_names(name, facts.measures)
    for metric in task.further_metrics:
        if metric in facts.measures:
            raise ValueError(
                f"Expected argument `federation.metrics` to have names that {name} does not log but"
                f" got `{metric}`: use another name."
            )
    return trial, replace(facts, measures={**facts.measures, **task.further_directions()})


def _copy_task(task: LightningTask, facts: ModuleFacts) -> LightningTask:
    """Return a copy of a task with other facts."""
    trial_task = copy.copy(task)
    trial_task.facts = facts
    return trial_task


class _Part(NamedTuple):
    """Part: the logs of the evaluation of a part in the trial.

    Attributes:
        stage: The stage whose step evaluates the part; ``None`` without a step.
        declared: Each logged name, and the direction of its metric of torchmetrics.
        returned: The loss that the step returns; NaN if it returns none.
        values: The logged values.
    """

    stage: str | None
    declared: dict[str, bool | None]
    returned: float
    values: dict[str, float]


def _try_evaluations(
    net: nn.Module,
    task: LightningTask,
    trial: Trial,
    owners: list[Part],
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[str, _Part], tuple[str, ...]]:
    """Evaluate both parts on a few samples; refuse a change that reaches the training.

    Metrics of an epoch's hook may need samples of all classes.

    Returns:
        The logs of both parts, and the names of changed values outside of the module.
    """
    name, parts = type(net).__name__, {}
    outside, readers = set[str](), set[str]()
    for part, step in (("val", "validation_step"), ("test", "test_step")):
        samples = trial.spread_samples(part)
        before = KeptValues.record(owners, reads_trained=True)
        guard, options = ValueGuard(owners), OptionGuard([optimizer])
        with _note_samples(trial, samples), note_reads(net, (METRICS,)) as reads:
            parts[part] = _try_evaluation(net, task, samples, part, step)
        if reads:
            readers.add(f"The evaluation by `{parts[part].stage}_step` of {name}")
        changes = before.changes(KeptValues.record(owners, reads_trained=True))
        numbers = _list_set_numbers(net, changes) if part == "val" else []
        guard.restore()
        parameters = changes.frozen_parameters | changes.trained_parameters
        parameters |= changes.replaced_parameters | changes.toggled
        parameters -= list_shortened_weights(net)  # an evaluation puts them back
        refuse_evaluation_changes(step, name, changes.attributes, options.restore(), parameters)
        outside |= changes.outside
        if changes.outside:
            rank_zero_warn(describe_outside_values(step, name, sorted(changes.outside)))
        if numbers:
            rank_zero_warn(describe_restored_numbers(step, name, numbers))
    for reader in sorted(readers):
        rank_zero_warn(describe_read(reader, METRICS))
    return parts, tuple(sorted(outside))


def _list_set_numbers(net: nn.Module, changes: Changes) -> list[str]:
    """Return the changed buffers that are saved, and the changed attributes that are one number."""
    buffers = (changes.buffers | changes.replaced_buffers) & net.state_dict().keys()
    attributes = [
        name
        for name in changes.attributes
        if isinstance(value := vars(net).get(name), float | int)
        or (isinstance(value, torch.Tensor) and value.numel() == 1)
    ]
    return sorted({*buffers, *attributes})


def _add_evaluation_facts(
    task: LightningTask, facts: ModuleFacts, parts: Mapping[str, _Part]
) -> ModuleFacts:
    """Return facts with the names of all metrics, their directions, and the parts with a loss."""
    logged = {part.stage: tuple(part.values) for part in parts.values() if part.stage is not None}
    names = {"validation": {}, "test": {}, **name_metrics(logged)}
    measures: dict[str, bool | None] = {}
    losses, logged_losses = set(), set()
    for name, part in parts.items():
        metrics = names.get(part.stage or "", {})
        measures |= {
            metric: _find_direction(task, metric, logged_name, part)
            for logged_name, metric in metrics.items()
            if metric != "loss"
        }
        logged_loss = next((part.values[n] for n, m in metrics.items() if m == "loss"), math.nan)
        if not math.isnan(part.returned) or not math.isnan(logged_loss):
            losses.add(name)
        if abs(part.returned - logged_loss) > 1e-3 * abs(logged_loss):  # False for NaN
            logged_losses.add(name)
    return replace(
        facts,
        measures=measures,
        logged_names={**facts.logged_names, **names},
        logged_losses=frozenset(logged_losses),
        loss_parts=frozenset(losses),
    )


def _find_direction(task: LightningTask, metric: str, logged_name: str, part: _Part) -> bool | None:
    """Return whether larger values are better: declared by the user, the metric or the name."""
    direction = task.directions.find(metric, logged_name)
    if direction is None:
        direction = Directions(task.lower_is_better).find(metric, logged_name)
    if direction is None:
        direction = part.declared.get(logged_name)
    if direction is None and logged_name not in part.declared:
        direction = guess_direction(metric)
    return direction


def _find_training_facts(
    net: nn.Module, task: LightningTask, trial: Trial
) -> tuple[Trial, ModuleFacts]:
    """Return the trial with inputs as the net takes them, and the facts about its training step.

    The step of a net with auxiliary outputs, for example, fails in evaluation mode.
    """
    errors = []
    input_types = (True, False) if trial.data.own_batches is None else (True,)
    for needs_training_mode, takes_integers in product((False, True), input_types):
        trial = replace(trial, takes_integers=takes_integers)
        try:
            batch = trial.augment_batch(trial.first_samples(count=7))  # no step unpacks 7 outputs
            with _note_samples(trial, batch):
                return trial, _try_training(net, task, batch, needs_training_mode)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _try_training(
    net: nn.Module, task: LightningTask, batch: Batch, needs_training_mode: bool
) -> ModuleFacts:
    """Run ``training_step``, and return the names that it logs."""
    facts = ModuleFacts(logged_names={"train": {}}, needs_training_mode=needs_training_mode)
    task, loss = _copy_task(task, facts), None
    versions = read_versions((batch.inputs, batch.targets))
    mode = training_mode(net) if needs_training_mode else nullcontext()
    stage, noted = trainer_stage(net, "train"), note_reads(net)
    with task.training_logs(0) as logs, mode, stage, noted as reads, torch.enable_grad():
        try:
            loss = _try_step(net, task, batch, "training_step", lambda: task.loss(net, batch))
        except SkippedStepError:
            rank_zero_warn(
                f"`training_step` of {type(net).__name__} returned None for the first minibatch, so"
                " pl_fed skips such steps as Lightning does: return the loss if that is not wanted."
            )
        if read_versions((batch.inputs, batch.targets)) == versions:
            with training_mode(net), suppress(Exception):  # it may do so in training mode only
                task.loss(net, batch)
    for name in sorted(reads):
        rank_zero_warn(describe_read(f"`training_step` of {type(net).__name__}", name))
    facts = replace(facts, changes_batch=read_versions((batch.inputs, batch.targets)) != versions)
    values = logs.get(id(net), {})
    names = name_metrics({"train": tuple(values)})["train"]
    for logged_name, reduction in task.other_reductions.items():
        rank_zero_warn(
            f"`train/{names.get(logged_name, logged_name)}` is the mean over local steps and"
            f" clients, and no {reduction}, the `reduce_fx` of self.log({logged_name!r}, ...) in"
            f" `training_step` of {type(net).__name__}."
        )
    for logged_name, name in names.items():
        is_other_loss = name == "loss" and _differs(loss, values[logged_name])
        if is_other_loss:
            names[logged_name] = name = logged_name  # the returned loss is `train/loss`
        if name in TAKEN_NUMBERS or (is_other_loss and name == "loss"):
            raise ValueError(
                f"Expected `training_step` of {type(net).__name__} to log names that pl_fed's own"
                f" `train/{name}` does not have but got {logged_name!r}: use another name."
            )
    return replace(facts, step_names=tuple(names.values()), logged_names={"train": names})


def _differs(loss: Any, logged: Any) -> bool:
    """Return whether a step logs another loss than the one that it returns."""
    return loss is not None and abs(float(loss) - float(logged)) > 1e-3 * abs(float(loss))


def _try_evaluation(
    net: nn.Module, task: LightningTask, batch: Batch, part: str, step: str
) -> _Part:
    """Evaluate a part, and return its logs."""
    logs = StepLogs()
    loss, values = _try_step(
        net,
        task,
        batch,
        step,
        lambda: task.evaluate(
            net, [batch], part, logs, accepts_undefined=False, names_as_logged=True
        ),
    )
    if part == "val" and logs.lasting_metrics:
        rank_zero_warn(describe_lasting_metrics(type(net).__name__, logs.lasting_metrics))
    return _Part(choose_stage(net, part), logs.directions(), loss, values)


def _try_step(
    net: nn.Module, task: LightningTask, batch: Batch, step: str, call: Callable[[], Any]
) -> Any:
    remedies = dict(_REMEDIES)
    if skipped := list_skipped_hooks(net):
        remedies[f"'{type(net).__name__}' object has no attribute"] = (
            f": pl_fed does not call {quote(skipped)}, so set the attribute in `__init__`"
        )
    takes = f"inputs {describe(batch.inputs)} and targets {describe(batch.targets)} of each sample"
    if isinstance(task.entries, OwnBatches):
        takes = "the batches that the data set's `collate_fn` makes"
    return call_or_explain(
        f"Expected `{step}` of {type(net).__name__} to take {takes} but that",
        call,
        remedies,
        explains_own=False,
    )


@contextmanager
def _note_samples(trial: Trial, batch: Batch) -> Iterator[None]:
    """Add the samples of the data set's own batch, and their clients, to the note of an error."""
    try:
        yield
    except Exception as error:
        if trial.data.own_batches is not None and batch.samples is not None:
            samples, clients = batch.samples.tolist(), trial.data.find_clients(batch.samples)
            place = f"samples {samples} of {name_clients(clients)}"
            error.add_note(f"In the trial before the first round, {place}.")
        raise


def _copy(client: Client, optimizer: torch.optim.Optimizer) -> nn.Module:
    """Return a copy of the net with the same trainer; the net if Python cannot copy it.

    A trainer has no optimizers and schedules before the fit, so the copy has its own.
    """
    try:
        net = copy.deepcopy(client.global_model)
    except Exception:  # for example an attribute with a lock or an open file
        return client.global_model
    with suppress(RuntimeError):  # the client has no trainer
        net.trainer = client.trainer  # type: ignore[assignment]
    lend_optimizer([net], client, optimizer)
    return net


def _check_names(net: str, measures: Mapping[str, bool | None]) -> None:
    """Refuse names of logged metrics that pl_fed needs for others."""
    taken = {name for name in TAKEN_NAMES if name not in ("accuracy", "loss")}
    suffixes = [suffix for suffix in (*STATISTICS, *TRAINED_STATISTICS, STANDARD_ERROR) if suffix]
    taken |= {f"{name}{suffix}" for name in ("loss", *measures) for suffix in suffixes}
    for name in measures:
        is_place = "/dataloader_idx_" in name  # a name of Lightning for several dataloaders
        if name in taken or is_place or not name.isprintable() or not name.strip():
            raise ValueError(
                f"Expected {net} to log metrics by names that no statistic over clients has"
                f" (`acc_std`, for example), in printable letters, but got {name!r}: use another"
                " name."
            )
