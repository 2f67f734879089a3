"""The value of a metric for one client."""

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import prints

from pl_fed.devices import is_about_devices, is_out_of_memory
from pl_fed.tasks.base import Task
from pl_fed.trees import leaves, tree_map

UNDEFINED_ERRORS = (RuntimeError, ValueError, IndexError)
"""Errors of metrics that are undefined for some samples, for example R² of one sample."""

_METRICS: WeakKeyDictionary[nn.Module, list[Metric | MetricCollection]] = WeakKeyDictionary()
"""The metrics of each module."""

_UNDEFINED_VALUE = re.compile("should be meaningless|is undefined|required to compute")


_DEVICE_ERRORS = getattr(torch, "AcceleratorError", ())


def raise_device_error(error: Exception, on_cpu: Callable[[], Any] | None = None) -> None:
    """Raise an error again if the device failed, and not the metric: then it is not undefined.

    A device fails if it has no memory left, if its driver says so, if tensors lie on two devices,
    or if the same computation succeeds on the CPU.

    Args:
        error: The error of a metric.
        on_cpu: Repeats the computation on copies of its tensors on the CPU; ``None`` if it ran on
            the CPU or cannot be repeated.

    Raises:
        Exception: The error, if the device failed.
    """
    if isinstance(error, _DEVICE_ERRORS) or is_out_of_memory(error) or is_about_devices(error):
        raise error
    if on_cpu is None:
        return
    try:
        on_cpu()
    except UNDEFINED_ERRORS:
        return
    raise error


def metric_value(metric: Any, arguments: Sequence[Any] | None, computes: bool = True) -> float:
    """Update a metric, and return its value; NaN if it is undefined for the samples.

    Args:
        metric: The metric.
        arguments: The arguments of its ``update``; ``None`` for no update.
        computes: Whether to compute the value; otherwise it is NaN.

    Raises:
        Exception: If the metric fails on its device but not on the CPU.

    Example:
        >>> from torchmetrics import MeanMetric
        >>> metric_value(MeanMetric(), [torch.tensor([1.0, 3.0])])
        2.0
    """

    def update_on_cpu() -> None:
        on_cpu = _copy_to_cpu(metric)
        on_cpu.reset()
        on_cpu.update(*tree_map(Tensor.cpu, list(arguments or ())))

    try:
        if arguments is not None:
            metric.update(*arguments)
    except UNDEFINED_ERRORS as error:
        raise_device_error(error, update_on_cpu if _is_on_device(metric, arguments) else None)
        return torch.nan
    try:
        return float(compute_metric(metric)) if computes else torch.nan
    except UNDEFINED_ERRORS as error:
        raise_device_error(error, repeat_on_cpu(metric))
        return torch.nan


def repeat_on_cpu(metric: Any) -> Callable[[], Any] | None:
    """Return a function that computes a metric on the CPU; ``None`` if it already lies there."""
    return (lambda: _copy_to_cpu(metric).compute()) if _is_on_device(metric, None) else None


def compute_metric(metric: Any) -> Any:
    """Return the value of a metric or collection; NaN if torchmetrics warns that it is undefined.

    For example, torchmetrics returns 0 for the AUROC of samples of one class, with a warning, in
    the first process only.

    Args:
        metric: A metric, or a collection of metrics with a dict of values.

    Example:
        >>> from torchmetrics import MeanMetric
        >>> metric = MeanMetric()
        >>> metric.update(3.0)
        >>> compute_metric(metric)
        tensor(3.)
    """
    value, is_undefined = _call_compute(metric, metric.compute)
    if not is_undefined:
        return value
    if isinstance(value, dict):
        return {name: _nan_like(entry) for name, entry in value.items()}
    return _nan_like(value)


def _call_compute(metric: Any, compute: Callable[[], Any]) -> tuple[Any, bool]:
    """Return the value of a metric, and whether torchmetrics warns that it is undefined."""
    in_every_process = mock.patch.object(prints.rank_zero_only, "rank", 0)
    with warnings.catch_warnings(record=True) as caught, in_every_process:
        warnings.simplefilter("always")
        value = compute()
    is_undefined = any(_UNDEFINED_VALUE.search(str(warning.message)) for warning in caught)
    if is_undefined and isinstance(metric, Metric):
        metric._computed = None  # a value that torchmetrics has kept comes without a warning
    return value, is_undefined


def list_metrics(module: nn.Module) -> list[Metric | MetricCollection]:
    """Return the metrics of torchmetrics, and collections of them, of a module.

    They are parts of it, or in lists, tuples and dicts that it has as attributes.
    """
    if module not in _METRICS:
        containers = [
            value
            for part in module.modules()
            for name, value in vars(part).items()
            if name != "_modules" and isinstance(value, list | tuple | dict)
        ]
        metrics = [*_walk_metrics([*module.modules()]), *_walk_metrics(containers)]
        _METRICS[module] = [*{id(metric): metric for metric in metrics}.values()]
    return _METRICS[module]


def _walk_metrics(value: Any, depth: int = 4) -> Iterator[Metric | MetricCollection]:
    """Yield the metrics in nested lists, tuples and dicts, with the parts of each metric."""
    if isinstance(value, Metric | MetricCollection):
        yield value
        yield from (part for part in value.children() if isinstance(part, Metric))
    elif depth and isinstance(value, list | tuple | dict):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _walk_metrics(entry, depth - 1)


def separate_states(collection: MetricCollection) -> None:
    """Give each metric of a collection a state of its own, in place.

    After the first update, torchmetrics lets metrics with equal states share one from then on. The
    few samples of a client may make states equal by chance, as those of accuracies at two
    thresholds. Then both metrics have one value for all later clients. Groups that a user names
    stay.

    Example:
        >>> from torchmetrics import MeanMetric, SumMetric
        >>> collection = MetricCollection([MeanMetric(), SumMetric()])
        >>> separate_states(collection)
        >>> collection.compute_groups
        {}
    """
    if collection._enable_compute_groups is True:
        collection._enable_compute_groups, collection._groups_checked = False, False
        collection._groups = {}
        collection.reset()  # the states that are shared already


@contextmanager
def undefined_as_nan(module: nn.Module) -> Iterator[None]:
    """Let the metrics of a module return NaN where they are undefined, such as R² of one sample.

    ``self.r2(outputs, y)`` returns the value of the batch, which may be undefined although that of
    the epoch is not. Curves and values of several classes stay as torchmetrics returns them: some
    of their numbers may be defined.
    """
    metrics = [metric for metric in list_metrics(module) if isinstance(metric, Metric)]
    before = [metric.compute for metric in metrics]
    for metric in metrics:
        vars(metric)["compute"] = _guard_compute(metric, metric.compute)
    try:
        yield
    finally:
        for metric, compute in zip(metrics, before):
            vars(metric)["compute"] = compute


def _guard_compute(metric: Metric, compute: Callable[[], Any]) -> Callable[[], Any]:
    """Return the ``compute`` of a metric with NaN instead of an error or an undefined number."""

    def compute_or_nan() -> Any:
        try:
            value, is_undefined = _call_compute(metric, compute)
            is_number = isinstance(value, Tensor) and value.numel() == 1
            return _nan_like(value) if is_undefined and is_number else value
        except UNDEFINED_ERRORS as error:
            raise_device_error(error, repeat_on_cpu(metric))
            return torch.tensor(torch.nan)

    return compute_or_nan


def find_source(value: Tensor, module: nn.Module) -> Metric | None:
    """Return the metric of a module that has just computed a value, or a dict with the value.

    Args:
        value: A tensor. Only the very tensor that the metric returned is found: a number computed
            from it may have the opposite direction.
        module: The module.
    """
    for metric in list_metrics(module):
        result = getattr(metric, "_computed", None)
        entries = result.values() if isinstance(result, dict) else (result,)
        if isinstance(metric, Metric) and any(entry is value for entry in entries):
            return metric
    return None


def name_computed_metrics(module: nn.Module) -> dict[str, Metric]:
    """Return the parts of a module that are metrics, computed after their last update, by name.

    A metric that has been reset is none of them.
    """
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, Metric) and part.update_called and part._computed is not None
    }


def keep_local(metric: Any) -> None:
    """Stop a metric and its parts from communicating: processes evaluate different clients.

    Sums of metrics, and wrappers of torchmetrics, compute the values of their parts.
    """
    for part in metric.modules():
        if isinstance(part, Metric):
            part.distributed_available_fn = _is_not_distributed


def local_metrics(task: Task, device: torch.device) -> dict[str, Any]:
    """Return a task's metrics by name, for one client; they do not communicate."""
    metrics = {name: metric.to(device) for name, metric in task.all_metrics().items()}
    for metric in metrics.values():
        keep_local(metric)
    return metrics


def _copy_to_cpu(metric: Any) -> Any:
    """Return a copy of a metric whose states and other tensors are on the CPU."""
    on_cpu = copy.deepcopy(metric).cpu()
    for module in on_cpu.modules():
        moved = {n: value.cpu() for n, value in vars(module).items() if isinstance(value, Tensor)}
        vars(module).update(moved)  # not states: `cpu` leaves them where they are
    return on_cpu


def _is_on_device(metric: Any, arguments: Sequence[Any] | None) -> bool:
    """Return whether a metric or its arguments have a tensor that is not on the CPU."""
    devices = {leaf.device.type for leaf in leaves(list(arguments or ()))}
    devices |= {module.device.type for module in metric.modules() if isinstance(module, Metric)}
    return bool(devices - {"cpu"})


def _nan_like(value: Any) -> Any:
    return value * torch.nan if isinstance(value, Tensor) else torch.nan


def _is_not_distributed() -> bool:
    return False
