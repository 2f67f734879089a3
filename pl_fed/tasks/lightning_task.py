"""The task of a LightningModule: its own steps define loss, metrics and predictions."""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, MinMaxMetric
from torchmetrics.wrappers.abstract import WrapperMetric

from pl_fed.arguments import check_choice
from pl_fed.devices import is_out_of_memory
from pl_fed.nets.calls import Net
from pl_fed.nets.modes import training_mode
from pl_fed.tasks.base import SkippedStepError, Task, as_floats
from pl_fed.tasks.metric_values import (
    UNDEFINED_ERRORS,
    keep_local,
    list_metrics,
    raise_device_error,
    separate_states,
    undefined_as_nan,
)
from pl_fed.tasks.module_facts import ModuleFacts
from pl_fed.tasks.module_steps import GRADIENT_HOOKS, call_step, list_hooks
from pl_fed.tasks.one_process import one_process
from pl_fed.tasks.own_batches import OwnBatches
from pl_fed.tasks.step_logs import StepLogs, name_metrics, strip_stage
from pl_fed.tasks.trainer_stages import trainer_stage
from pl_fed.text import first_line, quote
from pl_fed.trees import Tree, clone, describe, leaves, select
from pl_fed.types import Batch, SampleEntries

BatchStructure = Literal["pair", "joint"]


class LightningTask(Task):
    """Lightning task: a LightningModule's own steps, unchanged, are the learning problem.

    Clients with a LightningModule as net have this task by default. ``training_step`` returns the
    loss. Its logs become ``train/<name>``: the mean over the local steps of the cohort's clients.
    ``validation_step`` and ``test_step`` run on each client's own samples. Their logs become
    metrics with all statistics over clients. Metrics of torchmetrics in the module are reset
    before each client, and in training before each step. A name loses the prefix of its own step:
    ``val_acc`` of ``validation_step`` and ``test/acc`` of ``test_step`` are the metric ``acc``, as
    is ``val_acc`` that both log. If another logged name would then be equal to it, all of them stay
    as logged.

    Steps should log the same names in every step. A trial before training finds the names: other
    names are left out with a warning, and a missing one makes the mean of the round NaN.

    Steps take batches without padding. Algorithms that need the losses of single samples, such as
    FedTilt, refuse this task.

    Args:
        batch: The structure of a batch. ``"pair"`` is the tuple (inputs, targets). ``"joint"``
            merges dicts of inputs and targets into one dict, or tuples into one tuple. ``None``
            restores the dicts or tuples of a data set's samples. For data without such samples, it
            takes ``"joint"`` if both are dicts, otherwise ``"pair"``.
        lower_is_better: Names or patterns of logged numbers with small values for good models; the
            same as ``federation.lower_is_better``.

    Attributes:
        facts: The names that the steps log, and more; from the trial before training.
        entries: The places of inputs and target in the samples of the data set, if known; or the
            data set's own batches.
        other_reductions: The ``reduce_fx`` of numbers that ``training_step`` logs with another one
            than the mean; from the trial before training.

    Raises:
        ValueError: If ``batch`` is unknown.

    Example:
        >>> task = LightningTask()
        >>> task.build_batch({"ids": torch.zeros(2)}, {"labels": torch.ones(2)}).keys()
        dict_keys(['ids', 'labels'])
    """

    averages_samples = False
    runs_steps = True

    def __init__(
        self, batch: BatchStructure | None = None, lower_is_better: Sequence[str] = ()
    ) -> None:
        if batch is not None:
            check_choice(("pair", "joint"), batch=batch)
        self.batch = batch
        self.lower_is_better = tuple(lower_is_better)
        self.facts = ModuleFacts()
        self.entries: SampleEntries | OwnBatches | None = None
        self.other_reductions: dict[str, str] = {}
        self._omitted: set[str] = set()
        self._has_warned_of_undefined = False
        self._step_logs: dict[int, dict[str, Tensor]] | None = None
        self._batch_idx: Any = 0

    @property
    def name(self) -> str:
        """The name of the task's loss in messages."""
        return "the loss of `training_step`"

    def losses(self, outputs: Tree, targets: Tree) -> Tensor:
        """Raise an error: a step returns the loss of a whole batch.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "Expected a task with the losses of single samples but got LightningTask: the module's"
            " `training_step` returns the loss of a whole batch."
        )

    def is_sample_mean(self, outputs: Tree, targets: Tree) -> bool:
        """Return ``False``: a step may do anything with its batch."""
        return False

    def build_batch(self, inputs: Tree, targets: Tree) -> Any:
        """Return inputs and targets as the batch of a step."""
        if isinstance(self.entries, OwnBatches) or (self.batch is None and self.entries):
            return self.entries.join(inputs, targets)
        both_dicts = isinstance(inputs, dict) and isinstance(targets, dict)
        if both_dicts and self.batch != "pair":
            return {**inputs, **targets}
        if self.batch != "joint":
            return inputs, targets
        if isinstance(inputs, dict) or isinstance(targets, dict):
            raise ValueError(
                "Expected inputs and targets of the data to be both dicts for a LightningTask with"
                f' batch="joint" but got {type(inputs).__name__} and {type(targets).__name__}.'
            )
        parts = (inputs, targets)
        tuples = [tuple(part) if isinstance(part, tuple | list) else (part,) for part in parts]
        return (*tuples[0], *tuples[1])

    def _call(self, net: Callable[..., Any], step: str, batch: Batch, batch_idx: Any) -> Any:
        """Return the result of a step on a batch."""
        inputs, targets = batch.inputs, batch.targets
        if self.facts.changes_batch:  # the next model has the same minibatch
            inputs, targets = clone(inputs), clone(targets)
        example = self.build_batch(inputs, targets)
        if not isinstance(self.entries, OwnBatches):
            return call_step(net, step, example, batch_idx)
        return call_step(net, step, example, batch_idx, batch.device, self.entries.datamodule)

    # Training

    def loss(self, net: Callable[..., Any], batch: Batch) -> Tensor:
        """Return the loss of ``training_step`` on the samples that ``batch.mask`` selects."""
        if batch.mask is not None:
            selected = batch.mask.nonzero().flatten()
            if not len(selected):
                return 0 * _first_tensor(net).sum()
            inputs, targets = select(batch.inputs, selected), select(batch.targets, selected)
            batch = batch._replace(inputs=inputs, targets=targets)
        module, logs = _module_of(net), StepLogs(batch.device)
        reset_metrics(module)
        with logs.record(module):
            output = self._call(net, "training_step", batch, self._batch_idx)
        if self.facts.step_names is None:  # in the trial before training
            self.other_reductions |= logs.other_reductions
        loss = read_loss(output)
        if output is None:
            raise SkippedStepError("`training_step` returned None, which skips the step")
        if loss is None:
            raise TypeError(
                "Expected `training_step` to return a loss, or a dict with the tensor `loss`, but"
                f" got {_describe_output(output)}."
            )
        if self._step_logs is not None:
            values = self._name(logs.values(), "train")
            self._step_logs.setdefault(id(module), self._align_logs(values, loss))
        reset_metrics(module)
        return loss.to(batch.device)  # a step may compute its loss on the CPU

    def _name(self, values: Mapping[str, Any], stage: str) -> dict[str, Any]:
        """Return values by the names of metrics; a name that the trial did not log stays.

        If such a name is that of a metric with another name in the logs, it is left out.
        """
        names = self.facts.logged_names.get(stage)
        if names is None:
            names = name_metrics({stage: values})[stage]
        metrics = {*names.values()}
        ambiguous = {name for name in values if name not in names and name in metrics}
        self.warn_of_omitted(ambiguous, ())
        return {names.get(n, n): value for n, value in values.items() if n not in ambiguous}

    def _align_logs(self, values: dict[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
        """Return logged values by the names of the trial; NaN for a name without a value.

        All are on the loss's device, also numbers of Python.
        """
        if self.facts.step_names is None:
            return values
        self.warn_of_omitted(values, self.facts.step_names)
        missing = loss.new_full((), torch.nan)
        return {name: values.get(name, missing).to(loss.device) for name in self.facts.step_names}

    def warn_of_omitted(self, names: Iterable[str], known_names: Iterable[str]) -> None:
        """Warn once of each name that the trial before training did not log."""
        omitted = set(names) - set(known_names) - self._omitted
        if omitted:
            self._omitted |= omitted
            warnings.warn(
                f"pl_fed leaves out `{'`, `'.join(sorted(omitted))}`, which the steps of the module"
                " log in some batches only: log the same names in every step.",
                stacklevel=2,
            )

    @contextmanager
    def training_logs(self, batch_idx: Any) -> Iterator[dict[int, dict[str, Tensor]]]:
        """Collect the logs of a local step's first call of each module, by the module's id."""
        before = self._step_logs, self._batch_idx
        self._step_logs, self._batch_idx = {}, batch_idx
        try:
            yield self._step_logs
        finally:
            self._step_logs, self._batch_idx = before

    @contextmanager
    def without_logs(self) -> Iterator[None]:
        """Drop the logs within the context, for example of a gradient inside an objective."""
        before, self._step_logs = self._step_logs, None
        try:
            yield
        finally:
            self._step_logs = before

    def list_gradient_hooks(self, net: nn.Module) -> list[str]:
        """Return ``on_after_backward`` and ``on_before_optimizer_step``, if the module has them."""
        hooks = list_hooks(net)
        return [hook for hook in GRADIENT_HOOKS if hook in hooks]

    def call_gradient_hook(
        self, hook: str, net: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Call a hook of the module on its gradients, if it has the hook.

        The hook gets an optimizer with the module's own parameters: a client may train several
        models. Its logs are left out, with one warning.
        """
        if hook not in self.list_gradient_hooks(net):
            return
        own, own_optimizer = {*map(id, net.parameters())}, copy.copy(optimizer)
        own_optimizer.param_groups = [
            group for group in optimizer.param_groups if {*map(id, group["params"])} <= own
        ]
        logs = StepLogs()
        with logs.record(net):
            getattr(net, hook)(*([own_optimizer] if hook == "on_before_optimizer_step" else []))
        if not self._omitted.issuperset(logs.names):
            self._omitted |= {*logs.names}
            warnings.warn(
                f"pl_fed leaves out {quote(logs.names)}, which `{hook}` of"
                f" {type(net).__name__} logs: compute such a number in `training_step`, a gradient"
                " by `torch.autograd.grad`, and log it there.",
                stacklevel=2,
            )

    # Evaluation

    def metric_directions(self) -> Mapping[str, bool | None]:
        """Return the names of the logged metrics, and whether larger values are better."""
        return self.facts.measures

    def metric_names(self) -> set[str]:
        """Return all names of the metrics: without their stage, and as logged."""
        logged = (self.facts.logged_names.get(stage, {}) for stage in ("validation", "test"))
        return {*self.facts.measures}.union(*logged)

    def has_loss(self, part: str) -> bool:
        """Return whether the evaluation step of a part returns or logs a loss."""
        return part in self.facts.loss_parts

    def metric_name(self, name: str) -> str:
        """Return a metric's name without its stage: ``val_acc`` is ``acc``."""
        for stage in ("validation", "test"):
            if name in (names := self.facts.logged_names.get(stage, {})):
                return names[name]
        short_names = {strip_stage(name, stage) for stage in ("validation", "test")}
        return next((short for short in short_names if short in self.facts.measures), name)

    def evaluate(
        self,
        module: nn.Module,
        batches: Iterable[Batch],
        part: str,
        logs: StepLogs | None = None,
        accepts_undefined: bool = True,
        names_as_logged: bool = False,
    ) -> tuple[float, dict[str, float]]:
        """Return the loss and the metrics of a module on one client's samples.

        The loss is the loss that the evaluation step returns, or else the loss that it logs. The
        logged one counts if its mean is another one, such as over tokens. If there is none, it is
        NaN: ``training_step`` runs on training samples only. The caller restores what the step and
        the hooks change in the module.

        Args:
            module: A LightningModule in evaluation mode.
            batches: The client's samples, at least one; may be iterated several times.
            part: ``val`` or ``test``; the steps of the other part replace missing ones. ``train``
                has those of ``val``.
            logs: Records the logs; new logs by default.
            accepts_undefined: Whether metrics may be undefined for the samples. Metrics of
                torchmetrics in the module then return NaN, and an error of the hook at the end of
                an epoch is a warning.
            names_as_logged: Whether to return all values by the names of the logs, with the loss
                that the step returns.
        """
        stage = choose_stage(module, part)
        if stage is None:
            return torch.nan, {}
        logs, total, size = logs or StepLogs(), 0.0, 0
        reset_metrics(module)
        guard = undefined_as_nan(module) if accepts_undefined else nullcontext()
        with logs.record(module), guard, one_process(), trainer_stage(module, stage):
            for logs.source in (f"on_{stage}_start", f"on_{stage}_epoch_start"):
                getattr(module, logs.source)()
            logs.source = f"{stage}_step"
            for index, batch in enumerate(batches):
                logs.size = batch.size
                loss = read_loss(self._call(module, f"{stage}_step", batch, index))
                total += torch.nan if loss is None else float(loss) * batch.size
                size += batch.size
            try:
                logs.source = f"on_{stage}_epoch_end"
                getattr(module, logs.source)()
            except UNDEFINED_ERRORS as error:
                raise_device_error(error)
                if not accepts_undefined:
                    raise
                self._warn_of_undefined(module, stage, size, error)
        if names_as_logged:
            logs.lasting_metrics = logs.list_lasting_metrics(module)
        logged = logs.values()
        named = logged if names_as_logged else self._name(logged, stage)
        values = {name: float(value) for name, value in named.items()}
        reset_metrics(module)
        if names_as_logged:
            return torch.nan if loss is None else total / size, values
        logged_loss = values.pop("loss", None)
        if loss is None:
            return torch.nan if logged_loss is None else logged_loss, values
        has_own_mean = "loss" in self._name(logs.own_means, stage)
        return self._choose_loss(total / size, logged_loss, part, has_own_mean), values

    def _choose_loss(
        self, returned: float, logged: float | None, part: str, has_own_mean: bool
    ) -> float:
        """Return the loss that a step returns, or the other one that it logs."""
        if logged is None:
            return returned
        judged_part = "test" if part == "test" else "val"  # training samples are validated, too
        is_other = has_own_mean and not math.isclose(logged, returned, rel_tol=1e-6)
        return logged if is_other or judged_part in self.facts.logged_losses else returned

    def _warn_of_undefined(
        self, module: nn.Module, stage: str, size: int, error: Exception
    ) -> None:
        """Warn once that the hook at the end of an epoch failed for a client."""
        if self._has_warned_of_undefined:
            return
        self._has_warned_of_undefined = True
        warnings.warn(
            f"`on_{stage}_epoch_end` of {type(module).__name__} failed for a client with {size}"
            f" samples ({first_line(error)}): pl_fed counts its metrics as undefined there.",
            stacklevel=2,
        )

    def training_mean(self, module: nn.Module, batches: Iterable[Batch]) -> float:
        """Return the mean of the loss of ``training_step`` over one client's training samples."""
        total, size = 0.0, 0
        mode = training_mode(module) if self.facts.needs_training_mode else nullcontext()
        with self.without_logs(), mode, torch.enable_grad():  # a step may contain a gradient
            for index, batch in enumerate(batches):
                self._batch_idx = index
                with suppress(SkippedStepError):
                    total += float(self.loss(module, batch).detach()) * batch.size
                    size += batch.size
        return total / max(1, size)

    def metric_inputs(self, outputs: Tree, targets: Tree) -> tuple[Any, Any]:
        """Return predictions and targets for ``federation.metrics``.

        Of a dict of outputs, the predictions are the entry ``logits`` or ``prediction``. Outputs
        [samples, 1] take the shape [samples] of the targets. Outputs [samples, classes] beyond
        [0, 1] are logits of class ids, as for torchmetrics, and become probabilities.
        """
        if isinstance(outputs, dict):
            names = [name for name in ("logits", "prediction") if name in outputs]
            outputs = outputs[names[0]] if names else outputs
        if isinstance(targets, dict | tuple | list) and len(leaves(targets)) == 1:
            targets = leaves(targets)[0]
        fits = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
        if fits and outputs.numel() == targets.numel():
            outputs = outputs.reshape(targets.shape)
        elif fits and outputs.dim() == 2 and targets.dim() == 1 and not targets.is_floating_point():
            is_probability = (outputs >= 0) & (outputs <= 1)
            outputs = outputs if bool(is_probability.all()) else as_floats(outputs).softmax(1)
        return outputs, targets

    def predict_batch(self, module: nn.Module, batch: Batch, batch_idx: int = 0) -> Tree:
        """Return the result of ``predict_step``; without one, the outputs for the inputs.

        Args:
            module: A LightningModule in evaluation mode.
            batch: A batch of one client's samples.
            batch_idx: The index of the batch among those of the client.

        Raises:
            ValueError: If ``predict_step`` returns ``None``, or the module has none and refuses the
                inputs.
        """
        is_own = isinstance(self.entries, OwnBatches)
        if "predict_step" in list_hooks(module):
            outputs = self._call(module, "predict_step", batch, batch_idx)
        else:
            try:
                if not is_own:
                    return self.predict(module, batch.inputs)
                outputs = self._call(module, "predict_step", batch, batch_idx)
            except (TypeError, RuntimeError, AttributeError, LookupError) as error:
                if is_out_of_memory(error):
                    raise
                inputs = "its batches" if is_own else f"inputs {describe(batch.inputs)}"
                raise ValueError(
                    f"Expected {type(module).__name__} to have a `predict_step`, or to take"
                    f" {inputs}, but that failed ({first_line(error)}): define `predict_step`."
                ) from error
        if outputs is None:
            raise ValueError(
                f"Expected `predict_step` of {type(module).__name__} to return the predictions for"
                " its batch but got None: return them, also if it writes files of its own."
            )
        return outputs

    def predictions(self, outputs: Tree) -> dict[str, Tensor]:
        """Return the outputs: as ``prediction``, or the columns of a dict."""
        if isinstance(outputs, dict) and "prediction" in outputs:
            return outputs
        return {"prediction": outputs}


def read_loss(output: Any) -> Tensor | None:
    """Return the loss in the result of a step; ``None`` if there is none."""
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    return loss.reshape(()) if loss.dim() else loss


def _describe_output(output: Any) -> str:
    """Return the result of a step without a loss in words."""
    loss = output.get("loss", output) if isinstance(output, dict) else output
    return f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__


def reset_metrics(module: nn.Module) -> None:
    """Reset the metrics of torchmetrics in a module that have been updated.

    A wrapper such as ``Running`` does not count its updates. ``MinMaxMetric`` has no reset of its
    bounds. States that a test has made in inference mode are replaced: a fit cannot change them.
    """
    for metric in list_metrics(module):
        parts: list[Metric] = []
        if isinstance(metric, MetricCollection):
            separate_states(metric)
            parts = [*metric.values(copy_state=False)]
        else:
            keep_local(metric)
            parts = [metric]
        if any(map(_needs_reset, parts)):
            with torch.inference_mode(False):
                metric.reset()
        if isinstance(metric, MinMaxMetric):
            metric.min_val, metric.max_val = torch.tensor(torch.inf), torch.tensor(-torch.inf)


def _needs_reset(metric: Metric) -> bool:
    """Return whether a metric has been updated or may be, or reset in inference mode."""
    if metric.update_called or isinstance(metric, WrapperMetric):
        return True
    states = metric.metric_state.values()
    return any(isinstance(state, Tensor) and state.is_inference() for state in states)


def _module_of(net: Any) -> nn.Module:
    module: nn.Module = net.module if isinstance(net, Net) else net
    return module


def _first_tensor(net: Any) -> Tensor:
    """Return a trainable tensor of a net, for a loss of 0 with a gradient."""
    if isinstance(net, Net):
        return leaves(dict(net.tensors))[0]
    tensor: Tensor = next(leaf for leaf in net.parameters() if leaf.requires_grad)
    return tensor


def choose_stage(module: nn.Module, part: str) -> str | None:
    """Return the stage whose step evaluates a part of the data; ``None`` if there is no step."""
    stages = ("test", "validation") if part == "test" else ("validation", "test")
    hooks = list_hooks(module)
    return next((stage for stage in stages if f"{stage}_step" in hooks), None)
