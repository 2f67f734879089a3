"""A trial of the net before training, on a few samples: with task, loss, metrics and attacks."""

import copy
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pl_fed.arguments import check_finite_options, check_not_differentiable
from pl_fed.attacks import Attack
from pl_fed.attacks.base import apply_attacks
from pl_fed.clients.base import Client
from pl_fed.clients.features import compute_batch_features, compute_features, keeps_features
from pl_fed.clients.fedper import belongs
from pl_fed.clients.heads import list_modules
from pl_fed.clients.kept_parts import restore_values
from pl_fed.clients.module_optimizer import ModuleOptimizer
from pl_fed.devices import is_out_of_memory
from pl_fed.metrics.client_metrics import TAKEN_NAMES
from pl_fed.metrics.named import metric_arguments
from pl_fed.nets.calls import Net, reads_own_weights
from pl_fed.nets.fingerprints import is_by_user
from pl_fed.nets.modes import evaluation_mode, mixes_samples, training_mode
from pl_fed.preflight.explanations import call_or_explain, list_shapes
from pl_fed.preflight.module_trial import find_module_facts
from pl_fed.preflight.trial import Trial
from pl_fed.random import fork_all_generators, fork_torch_rng, read_generators
from pl_fed.tasks import Classification, LightningTask, Task
from pl_fed.tasks.criterion import CriterionTask
from pl_fed.tasks.metric_values import local_metrics
from pl_fed.tasks.module_facts import ModuleFacts
from pl_fed.text import quote
from pl_fed.trees import (
    Tree,
    are_equal,
    clone,
    count_samples,
    describe,
    leaves,
    read_versions,
    select,
)
from pl_fed.types import Batch, ClientContext

_Result = TypeVar("_Result")
_MINIBATCH = 64  # samples that a loss may need for a gradient
_COMPARED = 3  # samples whose outputs are compared in other batches
_ROUNDING = 1e-3  # largest difference by rounding, as a share of the largest output


@dataclass(frozen=True)
class NetFacts:
    """Net facts: the inputs of a net, and the kind of its task's loss.

    Attributes:
        takes_integers: Whether the net takes integer inputs.
        averages_samples: Whether the loss of a batch is the mean of one loss for each sample.
        changes_inputs: Whether the net changes its inputs in place.
        mixes_samples: Whether the net mixes the samples of a batch in evaluation mode, too.
        module: The facts about a LightningModule's steps.
    """

    takes_integers: bool
    averages_samples: bool = False
    changes_inputs: bool = False
    mixes_samples: bool = False
    module: ModuleFacts = field(default_factory=ModuleFacts)


def find_net_facts(trial: Trial) -> NetFacts:
    """Build the local optimizer, check the models, and try net and criterion on a few samples.

    Args:
        trial: The algorithm, with the task for its data.

    Raises:
        ValueError: If the net has half precision, the optimizer refuses its options, models or
            states do not fit together, the inputs cannot be augmented, the net refuses the inputs,
            its output does not fit the classes, the criterion refuses outputs and targets, or
            clients keep states of local optimizers, but there are none or they fit no row.
    """
    client = trial.client
    dtype = client.row("global").data.dtype
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(
            "Expected argument `net` to have parameters of float32 or float64 but got"
            f" {dtype}: small steps would be lost in them. To compute in lower precision, set the"
            " trainer's precision to bf16-mixed."
        )
    optimizer = call_or_explain(
        "Expected argument `optimizer` to build a local optimizer from parameter groups but that",
        lambda: client.objective.build_optimizer(client.trained_parameters),
        explains_own=not isinstance(client.objective.optimizer, ModuleOptimizer),
    )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "Expected argument `optimizer` to build one torch.optim.Optimizer but got"
            f" {type(optimizer).__name__}."
        )
    check_finite_options(optimizer=optimizer)
    check_not_differentiable(optimizer=optimizer)
    _try_kept_states(client, optimizer)
    client.state_defaults()  # refuses a default that is not a row
    client.server_state_defaults()
    with torch.no_grad(), fork_all_generators(), evaluation_mode(client), restore_values(client):
        if isinstance(client.task, LightningTask):
            return _try_module(trial, client.task, optimizer)
        return _try_net(trial)


def find_own_reads(trial: Trial) -> bool:
    """Return whether the net reads its own parameters in a call with other ones.

    Such a net keeps them in a list, an object or a function, too; a function still has those of the
    original in a copy. A net whose loss fails is left to the trial of the local steps, as is one
    that Python cannot copy.
    """

    def compute(client: Client, batch: Batch) -> bool:
        row = client.row("global")
        rows = [row.data, trial.client.row("global").data]
        net = Net(client.global_model, row.layout.views(row.data.clone()))
        return reads_own_weights(rows, lambda: client.task.loss(net, batch))

    return bool(_compute_on_copy(trial, compute))


def check_default_parts(trial: Trial) -> None:
    """Refuse parts that an argument names by default, if the loss does not depend on them.

    The last module of a net may be a copy for a moving average, and not the head. A warning tells
    of one that the net calls before another module: its head may be defined before its body. A loss
    that fails is left to the trial of the local steps, as is a net that Python cannot copy.

    Raises:
        ValueError: With the argument, and the last part that changes the loss.
    """
    client = trial.client
    used = _compute_on_copy(trial, _find_used_parts) if client.default_parts else None
    if used is None:
        return
    algorithm, net = type(client).__name__, type(client.global_model).__name__
    for argument, parts in client.default_parts.items():
        if used.names and not any(belongs(name, parts) for name in used.names):
            raise ValueError(
                f"Expected argument `{argument}` to name parts on which the loss of {net} depends"
                f" but got None, which is its last module, {quote(parts)}, without a gradient: set"
                f" `model.{argument}` to the modules that {algorithm} needs, such as"
                f" {list_modules(used.names)[-1:]}."
            )
        called = [name for name in used.called if not _contains(name, parts)]
        if any(belongs(name, parts) for name in called) and not belongs(called[-1], parts):
            rank_zero_warn(
                f"`model.{argument}` of {algorithm} is {quote(parts)}, the module that {net}"
                f" defines last, but {net} calls {quote(called[-1:])} after it. If that is the"
                f" head, set `model.{argument}: {called[-1:]}`."
            )


def _contains(module: str, parts: Sequence[str]) -> bool:
    """Return whether a module, by its name, contains one of other parts."""
    return not module or any(part.startswith(f"{module}.") for part in parts)


def warn_of_untrained_parameters(client: Client) -> None:
    """Warn of trainable parameters outside of the models, which no local optimizer gets."""
    in_models = {id(p) for model in client.models for p in client.model(model).parameters()}
    names = [
        name
        for name, parameter in client.named_parameters()
        if parameter.requires_grad and id(parameter) not in in_models
        if not name.startswith("sample_criterion.")  # that of `criterion` once more
    ]
    if names:
        rank_zero_warn(
            f"No model of {type(client).__name__} contains {quote(names)}, which keep their first"
            " values: to train them, put them into the net; otherwise set requires_grad=False."
        )


def refuse_unknown_options(client: Client) -> None:
    """Refuse options of a model that the local optimizer does not have; torch ignores these.

    An option of 0 or false turns something off, which another optimizer may lack.

    Raises:
        ValueError: With the options of the optimizer.
    """
    chosen = {
        name: [option for option, value in client.models[name].options.items() if value]
        for name in client.trained
    }
    if not any(chosen.values()):
        return
    optimizer = client.objective.build_optimizer(client.trained_parameters)
    arguments = getattr(optimizer, "defaults", None)
    for name, options in chosen.items():
        unknown = [option for option in options if arguments and option not in arguments]
        if unknown:
            raise ValueError(
                f"Expected `options` of model `{name}` of {type(client).__name__} to be arguments"
                f" of {type(optimizer).__name__} ({', '.join(arguments or ())}) but got"
                f" {quote(unknown)}."
            )


def refuse_unusable_loss(trial: Trial) -> None:
    """Refuse a loss without a gradient, and one that reads the gradients of parameters.

    Objectives with a term of their own, such as Ditto's, would train by that term alone. Models of
    clients have no ``.grad``; a log that reads it is wrong, and gets a warning. A loss that fails
    is left to the trial of the local steps, as is a net that Python cannot copy.

    Raises:
        ValueError: With the remedy.
    """
    reads = _compute_on_copy(trial, _find_loss_reads)
    if reads is None:
        return
    name, index = type(trial.client.global_model).__name__, trial.data.train.index
    # the loss of pairs, for example, may need more samples than two
    spread = index[:: max(1, len(index) // _MINIBATCH)][:_MINIBATCH]  # of all clients
    if (
        not reads.has_gradient
        and _compute_on_copy(trial, lambda *args: _read_numbers(*args)[1], spread) is False
    ):
        raise ValueError(
            f"Expected {trial.client.task.name} of {name} to have a gradient but got a number"
            " without one: compute it from the net's outputs, without detach(), item() or"
            " torch.no_grad()."
        )
    if reads.in_loss:
        raise ValueError(
            f"Expected `training_step` of {name} to read no `.grad` of parameters, which is None"
            " there for all models of clients, but got a loss that depends on it: call"
            " torch.autograd.grad in `training_step`, or use `on_before_optimizer_step`."
        )
    if reads.in_logs:
        rank_zero_warn(
            f"`training_step` of {name} logs a value of `.grad` of parameters, which is None there"
            " for all models of clients: log it in `on_before_optimizer_step`."
        )


@dataclass(frozen=True)
class _LossReads:
    """Loss reads: the parameters and gradients on which the numbers of a training step depend.

    Attributes:
        has_gradient: Whether the loss has a gradient.
        in_loss: Whether the loss reads ``.grad`` of parameters.
        in_logs: Whether a log does.
    """

    has_gradient: bool
    in_loss: bool = False
    in_logs: bool = False


def _find_loss_reads(client: Client, batch: Batch) -> _LossReads:
    """Take a training step without gradients, and with gradients of 0 and of NaN in ``.grad``.

    A number that NaN alone makes NaN reads them. Only steps of a LightningModule can.
    """
    numbers, has_gradient = _read_numbers(client, batch)
    if not client.task.runs_steps:
        return _LossReads(has_gradient)
    steps = [numbers]
    for gradient in (0.0, math.nan):
        for parameter in client.global_model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, gradient)
        steps.append(_read_numbers(client, batch)[0])
    in_loss, *in_logs = (
        math.isfinite(first) and not math.isnan(zero) and math.isnan(lost)
        for first, zero, lost in zip(*steps)
    )
    return _LossReads(has_gradient, in_loss, any(in_logs))


def _read_numbers(client: Client, batch: Batch) -> tuple[list[float], bool]:
    """Return the loss and then the logs of a training step, and whether the loss has a gradient."""
    net = client.global_model
    with training_mode(net), client.task.training_logs(0) as logs:
        loss = client.task.loss(net, batch)
    values = [loss.detach(), *logs.get(id(net), {}).values()]
    return [float(value) for value in values], loss.requires_grad


@dataclass(frozen=True)
class _UsedParts:
    """Used parts: the parts of a net that take part in its loss.

    Attributes:
        names: The names of the trainable parameters that change the loss.
        called: The modules with such parameters, in the order of their last calls.
    """

    names: list[str]
    called: list[str]


def _find_used_parts(client: Client, batch: Batch) -> _UsedParts:
    """Return the parts of the net that the loss of a few samples uses."""
    net, parameters, called = client.global_model, client.row("global").tensors, []
    hooks = [
        net.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
        for name in list_modules(parameters)
    ]
    try:
        loss = client.task.loss(net, batch)
    finally:
        for hook in hooks:
            hook.remove()
    gradients = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)
    names = [name for name, value in zip(parameters, gradients) if value is not None]
    modules = set(list_modules(names))
    last_calls = list(dict.fromkeys(name for name in reversed(called) if name in modules))
    return _UsedParts(names, last_calls[::-1])


def _compute_on_copy(
    trial: Trial, compute: Callable[[Client, Batch], _Result], index: Tensor | None = None
) -> _Result | None:
    """Return a result for samples, by default two, on a copy of the client in evaluation mode.

    The result is ``None`` if there are no samples, Python cannot copy the client, or ``compute``
    fails.
    """
    index = trial.data.train.index[:2] if index is None else index
    if not len(index):
        return None
    with ExitStack() as stack:
        try:
            copied, _ = stack.enter_context(trial.lend_copy())
        except Exception:  # for example an attribute with a lock or an open file
            return None
        batch = copied.load_minibatch(index)
        try:
            return compute(copied.client, batch)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None


def _try_kept_states(client: Client, optimizer: torch.optim.Optimizer) -> None:
    """Refuse to keep the states of local optimizers if there are none or they fit no row."""
    layouts = call_or_explain(
        "Expected a local optimizer that steps from gradients alone for"
        " `federation.engine.keep_optimizer_state: true` but that",
        lambda: client.optimizer_layouts,
        explains_own=False,
    )
    if client.keeps_optimizer_state and not layouts:
        raise ValueError(
            "Expected a local optimizer with a state, such as Adam or SGD with momentum, for"
            f" `federation.engine.keep_optimizer_state: true` but {type(client).__name__} has"
            f" {type(optimizer).__name__} without one: set false."
        )


def _try_module(trial: Trial, task: LightningTask, optimizer: torch.optim.Optimizer) -> NetFacts:
    """Try the steps of a LightningModule, and further metrics."""
    trial, facts = find_module_facts(trial, task, optimizer)
    if task.further_metrics:
        net, batch = trial.client.global_model, trial.spread_samples("val")
        outputs = call_or_explain(
            f"Expected `predict_step` of {type(net).__name__} to take the batches of"
            " `validation_step`, since `federation.metrics` reads its predictions, but that",
            lambda: task.predict_batch(net, batch),
            explains_own=False,
        )
        _try_metrics(trial.client, outputs, batch.targets)
    return NetFacts(trial.takes_integers, module=facts)


def _try_net(trial: Trial) -> NetFacts:
    """Try net, loss and metrics; if the net refuses integers, they become real numbers."""
    client, data, task = trial.client, trial.data, trial.client.task
    task.check_inputs(data.inputs)
    batch = trial.first_samples()
    try:
        outputs, changes_inputs = _predict(trial, batch)
    except ValueError:
        if all(leaf.is_floating_point() for leaf in leaves(batch.inputs)):
            raise
        trial = replace(trial, takes_integers=False)
        batch = trial.first_samples()
        outputs, changes_inputs = _predict(trial, batch)
    task.check_targets(data.targets, data.num_classes)
    task.check_outputs(outputs, batch.targets, data.num_classes)
    _warn_of_probabilities(client, outputs)
    loss = _try_loss(client, outputs, batch.targets)
    if trial.augment is None:
        task.check_loss(client.global_model, batch.inputs, batch.targets, loss)
    _try_metrics(client, outputs, batch.targets)
    _try_predictions(task, outputs)
    with fork_torch_rng(client.device):
        averages_samples = _averages_samples(trial, outputs)
    mixed = mixes_samples(client.global_model) or _find_mixed_samples(trial)
    return NetFacts(trial.takes_integers, averages_samples, changes_inputs, mixed)


def _warn_of_probabilities(client: Client, outputs: Tree) -> None:
    """Warn if the net of a classification ends in a softmax: its outputs in a batch sum to 1."""
    if not isinstance(client.task, Classification) or not isinstance(outputs, Tensor):
        return
    scores = outputs.detach().double()
    are_shares = scores.shape[1] > 1 and bool((scores >= 0).all())
    if are_shares and bool((scores.sum(1) - 1).abs().max() < _ROUNDING):
        rank_zero_warn(
            f"Outputs of {type(client.global_model).__name__} are probabilities, but the task"
            f" {type(client.task).__name__} takes logits: the cross entropy, and the probabilities"
            " of predictions, apply a softmax once more. Remove the softmax at the end of the net."
        )


def _find_mixed_samples(trial: Trial) -> bool:
    """Return whether outputs for a sample depend on the other samples of its batch; warn of it.

    A batch is compared with batches of its first and of its last sample alone: a recurrent net over
    the samples, by a forgotten ``batch_first=True``, changes the last output only. The net is in
    evaluation mode. A net that fails for such a batch is left to later trials.
    """
    client, index = trial.client, trial.data.train.index
    spread = index[:: max(1, len(index) // _COMPARED)][:_COMPARED]
    if len(spread) < _COMPARED or trial.data.own_batches is not None:
        return False
    inputs = trial.load(spread).inputs

    def compute(positions: list[int]) -> list[Tensor]:
        with (
            fork_all_generators(client.device),  # equal draws in all batches
            restore_values(client),
            client.draws.without_key(),
        ):
            outputs = client.task.predict(client.global_model, select(inputs, positions))
        return [leaf for leaf in leaves(outputs) if leaf.is_floating_point()]

    try:
        together = compute(list(range(_COMPARED)))
        mixed = any(
            _differ(leaf[position], other[position])
            for position in (0, _COMPARED - 1)
            for leaf, other in zip(together, compute([position] * _COMPARED))
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False
    if mixed:
        rank_zero_warn(
            f"Outputs of {type(client.global_model).__name__} for a sample depend on the other"
            " samples of its batch, in evaluation mode, too: each client is evaluated alone. If"
            " this is not meant, look for a layer without `batch_first=True`, or for an operation"
            " over the first dimension."
        )
    return mixed


def _differ(values: Tensor, others: Tensor) -> bool:
    """Return whether outputs differ by more than rounding."""
    largest = torch.maximum(values.abs().max(), others.abs().max())
    return bool((values - others).abs().max() > _ROUNDING * largest)


def _predict(trial: Trial, batch: Batch) -> tuple[Tree, bool]:
    """Return the net's outputs for a batch, and whether the net changes its inputs in place.

    The batch is augmented if ``augment`` is set.
    """
    client, net = trial.client, trial.client.global_model
    with fork_torch_rng(batch.device):
        inputs = trial.augment_batch(batch).inputs
    versions = read_versions(inputs)
    outputs = call_or_explain(
        f"Expected argument `net` to take inputs of shape {describe(inputs)} but"
        f" {type(net).__name__}",
        lambda: client.task.predict(net, inputs),
        remedies=_INPUT_REMEDIES,
    )
    changes_inputs = read_versions(inputs) != versions
    copied = clone(inputs)
    versions = read_versions(copied)
    with fork_torch_rng(batch.device), training_mode(net), suppress(Exception):
        client.task.predict(net, copied)  # a net may change them in training mode only
    changes_inputs |= read_versions(copied) != versions
    # a task of an earlier fit gives a copy
    return outputs, client.task.changes_inputs or changes_inputs


def _try_loss(client: Client, outputs: Tree, targets: Tree) -> Tensor:
    """Return the loss; refuse a criterion that fails, or does not return one number.

    The task learns whether its criterion changes the targets in place.
    """
    targets = clone(targets)
    versions = read_versions(targets)
    is_real = isinstance(targets, Tensor) and targets.is_floating_point()
    loss = call_or_explain(
        f"Expected argument `criterion` to take outputs of shape {list_shapes(outputs)} and targets"
        f" of shape {list_shapes(targets)} ("
        f"{', '.join(str(leaf.dtype) for leaf in leaves(targets))}"
        f"{', where class ids are integers' if is_real else ''}) but {client.task.name}",
        lambda: client.task.batch_loss(outputs, targets),
        remedies=_TARGET_REMEDIES,
    )
    if isinstance(client.task, CriterionTask) and read_versions(targets) != versions:
        client.task.changes_targets = True
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            "Expected argument `criterion` to give one number, the loss of a batch, but"
            f" {client.task.name} gave {got}."
        )
    return loss


def _try_metrics(client: Client, outputs: Tree, targets: Tree) -> None:
    """Refuse metrics that fail for outputs and targets, or have a reserved name."""
    name = type(client.task).__name__
    for key, metric in local_metrics(client.task, client.device).items():
        if not key.isidentifier() or key in TAKEN_NAMES:
            raise ValueError(
                f"Expected the metrics of the task {name} to have names other than"
                f" {', '.join(TAKEN_NAMES)} but got {key!r}."
            )
        expected = (
            f"Expected the metric `{key}` of the task {name} to take outputs of shape"
            f" {list_shapes(outputs)} and targets of shape {list_shapes(targets)} but that"
        )
        pair = call_or_explain(expected, lambda: client.task.metric_inputs(outputs, targets))
        _check_pair(name, pair)
        if is_by_user(client.task) and all(isinstance(v, Tensor) for v in pair):
            expected = (
                f"Expected the metric `{key}` of the task {name} to take outputs of shape"
                f" {list_shapes(pair[0])} and targets of shape {list_shapes(pair[1])}, as its"
                " `metric_inputs` returns them, but that"
            )
        call_or_explain(
            expected,
            lambda: metric.update(*metric_arguments(metric, *pair)),  # noqa: B023
        )
        _check_single_number(key, metric)


def _try_predictions(task: Task, outputs: Tree) -> None:
    """Refuse predictions without a column ``prediction``; another error appears in ``predict``."""
    try:
        with torch.no_grad():
            columns = task.predictions(outputs)
    except Exception:
        return
    if isinstance(columns, dict) and "prediction" not in columns:
        raise ValueError(
            f"Expected `predictions` of the task {type(task).__name__} to return a column"
            f" `prediction` but got {', '.join(map(str, columns)) or 'no column'}: rename one."
        )


def _check_pair(name: str, values: object) -> None:
    """Refuse other arguments of metrics than two values: predictions and targets."""
    if isinstance(values, tuple) and len(values) == 2:
        return
    got = f"{len(values)} values" if isinstance(values, tuple) else type(values).__name__
    raise ValueError(
        f"Expected `metric_inputs` of the task {name} to return two values, predictions and"
        f" targets, but got {got}: join several tensors in a dict, which the metric gets."
    )


def _check_single_number(name: str, metric: Any) -> None:
    """Refuse a metric with several numbers as value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = metric.compute()
        except (RuntimeError, ValueError, IndexError):  # undefined for a few samples
            return
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"Expected the metric `{name}` to give one number for a client but got {shape}: set,"
            " for example, its argument `average: macro`."
        )


_INPUT_REMEDIES = {
    "'indices'": ": inputs are floating-point numbers, so call an embedding with x.long()",
}
_CLASS_IDS = ": to use real-valued targets as class ids, call targets.long() in the criterion"
_LABELS = ": give several labels of a sample as floating-point numbers"
_TARGET_REMEDIES = {
    "output type Long": _LABELS,
    "Long but expected": _LABELS,
    "to be Long": _CLASS_IDS,
    "type Long": _CLASS_IDS,
    "got Long": _LABELS,
}

_MAX_SAMPLES, _BATCH = 512, 16
_MAX_NUMBERS = 1 << 22  # numbers in the outputs of all samples


def _averages_samples(trial: Trial, outputs: Tree) -> bool:
    """Return whether the loss of a batch is the mean of one loss for each sample, on real targets.

    The test uses targets of as many clients as possible. It also uses the targets with the smallest
    and the largest numbers, which may be codes for missing values.

    Args:
        trial: The algorithm and the data.
        outputs: Outputs of the current model for a few samples.
    """
    client, data = trial.client, trial.data
    index, num_outputs = data.train.index, count_samples(outputs)
    numel = max(1, sum(leaf[0].numel() for leaf in leaves(outputs)))
    num_samples = min(_MAX_SAMPLES, max(2, _MAX_NUMBERS // numel), len(index))
    numbers = [leaf.byte() if leaf.dtype == torch.bool else leaf for leaf in leaves(data.targets)]
    values = [leaf[:, None].flatten(1) for leaf in numbers]  # masks have no smallest position
    extreme = torch.stack(
        [position for v in values for position in (v.amin(1).argmin(), v.amax(1).argmax())]
    )
    spread = index[torch.linspace(0, len(index) - 1, num_samples, dtype=torch.float64).long()]
    targets = client.place(select(data.targets, torch.cat([extreme, spread])))
    size = min(_BATCH, max(2, _MAX_NUMBERS // numel))
    for begin in range(0, count_samples(targets), size):
        batch_targets = select(targets, slice(begin, begin + size))
        positions = torch.arange(count_samples(batch_targets), device=client.device) % num_outputs
        if not client.task.is_sample_mean(select(outputs, positions), batch_targets):
            return False
    return True


def try_features(trial: Trial) -> None:
    """Try a net that keeps features: training on features must not differ.

    Raises:
        ValueError: If inputs are augmented, the features of two samples need a gradient, or the net
            has other outputs for these features than for the samples.
    """
    client, net = trial.client, trial.client.global_model
    if not keeps_features(net):
        return
    name = type(net).__name__
    if trial.augment is not None:
        raise ValueError(
            f"Expected no argument `augment` for {name}, which keeps features, but got"
            f" {trial.augment}: features are computed once, from inputs without augmentation."
        )
    if trial.data.redraw is not None:
        raise ValueError(
            f"Expected samples that are drawn once for {name}, which keeps features, but got a data"
            " set that draws at random: set `data.dataset.redraw` to false, or `keep_features` of"
            " the net."
        )
    x = trial.first_samples().inputs
    if not isinstance(x, Tensor):
        raise ValueError(
            f"Expected inputs of one tensor for {name} with `keep_features` = True but got"
            f" {describe(x)}."
        )
    with evaluation_mode(client), restore_values(client):
        expected = f"Expected `features` of {name} with `keep_features` = True to take inputs"
        features = call_or_explain(f"{expected} but that", lambda: compute_features(net, x))
        if features.requires_grad:
            raise ValueError(
                f"Expected `features` of {name} with `keep_features` = True to use frozen"
                " parameters only but got trainable ones: set requires_grad=False on them."
            )
        expected = (
            f"Expected {name} with `keep_features` = True to take features in place of inputs"
        )
        outputs = call_or_explain(f"{expected} but that", lambda: net(features))
        if not torch.allclose(outputs, net(x), rtol=1e-3, atol=1e-5):
            raise ValueError(f"{expected} but got other outputs for features than for inputs.")


def try_attacks(trial: Trial, attacks: Collection[Attack]) -> None:
    """Try attacks on a few samples, so that their errors appear before training."""
    if not attacks:
        return
    with restore_values(trial.client):
        batch = compute_batch_features(trial.client, trial.first_samples())
    context = ClientContext(seed=0, round=0, client=0, num_classes=trial.data.num_classes)
    for attack in attacks:
        apply_attacks(batch, [attack], context)
        if not attack.trains and any(map(is_by_user, attack.list_parts())):
            _warn_of_memory_and_draws(attack, batch, context)
        attack.trigger(batch)
        if attack.trains:
            net = trial.client.global_model
            with evaluation_mode(net), restore_values(trial.client), torch.no_grad():
                attack.try_training(net, batch, context)


def _warn_of_memory_and_draws(attack: Attack, batch: Batch, context: ClientContext) -> None:
    """Warn if a copy of an attack poisons equal samples otherwise at the second time, or draws."""
    try:
        copied = copy.deepcopy(attack)
    except Exception:  # for example an attribute with a lock
        return
    poisoned: list[list[Tensor]] = []
    with fork_all_generators(leaves(batch.inputs)[0].device) as seed:
        for _ in range(2):
            seed(0)
            before = read_generators()
            own = batch._replace(inputs=clone(batch.inputs), targets=clone(batch.targets))
            changed = apply_attacks(own, [copied], context)
            poisoned.append([*leaves(changed.inputs), *leaves(changed.targets)])
            draws = read_generators() != before
    if not are_equal(*poisoned):
        rank_zero_warn(
            f"`poison` of {type(attack).__name__} keeps values from one call to the next, which a"
            " resumed run lacks, and which depend on the order of the clients: let it depend on"
            " the samples and on `context` alone, such as `context.round`."
        )
    if draws:
        rank_zero_warn(
            f"`poison` of {type(attack).__name__} draws from a global generator, so that engines"
            " draw other numbers: draw by keys of `context` and `batch.samples`, as"
            " `pl_fed.attacks.RandomLabels` does."
        )
