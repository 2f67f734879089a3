"""The logs of one step, or of one client's steps, of a LightningModule."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from pl_fed.tasks.directions import metric_direction
from pl_fed.tasks.metric_values import (
    UNDEFINED_ERRORS,
    compute_metric,
    find_source,
    name_computed_metrics,
    raise_device_error,
    repeat_on_cpu,
)
from pl_fed.trees import leaves

_STAGES = {
    "train": re.compile(r"^(?:train|training)[/_. -]+(?=.)"),
    "validation": re.compile(r"^(?:val|valid|validation)[/_. -]+(?=.)"),
    "test": re.compile(r"^test[/_. -]+(?=.)"),
}
_REDUCTIONS = ("mean", "sum", "min", "max")


class StepLogs:
    """Step logs: records ``self.log`` and ``self.log_dict`` of a LightningModule.

    A number has the mean over its steps as value, weighted by their samples, or another
    ``reduce_fx``. A metric of torchmetrics has the value of its state at the end.

    Attributes:
        device: The device of numbers of Python; ``None`` for the CPU.
        size: The number of samples of the current step.
        source: The step or hook that runs. If several of them log one name, the last one counts,
            as in Lightning.
        lasting_metrics: The names of the module's metrics that a plain fit does not reset, after
            the trial of an evaluation.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.size = 1
        self.source = ""
        self.lasting_metrics: list[str] = []
        self._sources: dict[str, str] = {}
        self._numbers: dict[str, list[Tensor]] = {}
        self._weights: dict[str, list[float]] = {}
        self._reductions: dict[str, str] = {}
        self._metrics: dict[str, Metric | tuple[MetricCollection, str]] = {}
        self._results: dict[str, Metric] = {}
        self._own_means: set[str] = set()
        self._module: nn.Module | None = None

    @property
    def names(self) -> list[str]:
        """The names of all logged values."""
        return [*self._numbers, *self._metrics]

    @property
    def own_means(self) -> dict[str, None]:
        """The names of values that need not be means over samples.

        They have a ``batch_size`` or a ``reduce_fx`` of their own, are metrics of torchmetrics, or
        a hook logs them.
        """
        hooks = [name for name, source in self._sources.items() if not source.endswith("_step")]
        return dict.fromkeys(sorted({*self._own_means, *self._metrics, *hooks}))

    @property
    def other_reductions(self) -> dict[str, str]:
        """The ``reduce_fx`` of numbers that have another one than the mean."""
        return {name: fx for name, fx in self._reductions.items() if fx != "mean"}

    def list_lasting_metrics(self, module: nn.Module) -> list[str]:
        """Return the names of a module's metrics that a plain fit does not reset.

        They have been computed since their last update, and are no logged metric: Lightning resets
        logged ones alone.
        """
        logged = [_find_member(metric) for metric in self._metrics.values()]
        return [
            name
            for name, metric in name_computed_metrics(module).items()
            if not any(metric is other for other in logged)
        ]

    @contextmanager
    def record(self, module: nn.Module) -> Iterator[None]:
        """Record the logs of a module within the context.

        A module has one optimizer, so that ``toggle_optimizer`` changes nothing, as in a plain fit.
        Lightning's own would look for the parameters of a client in the trainer's optimizer.
        """
        attributes = vars(module)
        methods: dict[str, Callable[..., None]] = {"log": self.log, "log_dict": self.log_dict}
        methods |= dict.fromkeys(("toggle_optimizer", "untoggle_optimizer"), _toggle_nothing)
        before: dict[str, Any] = {name: attributes[name] for name in methods if name in attributes}
        attributes.update(methods)
        self._module = module
        try:
            yield
        finally:
            for name in methods:
                del attributes[name]
            attributes.update(before)

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Record a number, a tensor of one number, or a metric of torchmetrics.

        The arguments are those of ``LightningModule.log``; pl_fed honours ``reduce_fx`` and
        ``batch_size``.

        Raises:
            TypeError: If the value is of another type.
            ValueError: If the tensor has several numbers, or the reduction is unknown.
        """
        self._begin_value(name)
        if isinstance(value, Metric):
            self._add_metric(name, value)
            return
        if name in self._metrics:
            raise ValueError(_describe_second_value(name))
        reduction = getattr(reduce_fx, "__name__", reduce_fx)
        if reduction not in _REDUCTIONS:
            raise ValueError(
                f"Expected `reduce_fx` of self.log({name!r}, ...) to be one of"
                f" {', '.join(_REDUCTIONS)} but got {reduction!r}."
            )
        if isinstance(value, Real):
            value = torch.full((), float(value), device=self.device)  # no copy from the CPU
        if not isinstance(value, Tensor):
            raise TypeError(
                f"Expected self.log({name!r}, ...) to take a number, a tensor of one number or a"
                f" metric of torchmetrics but got {type(value).__name__}."
            )
        if value.numel() != 1:
            raise ValueError(
                f"Expected self.log({name!r}, ...) to take one number but got shape"
                f" {list(value.shape)}."
            )
        if self._module is not None and (metric := find_source(value, self._module)) is not None:
            self._results[name] = metric
        number = value.detach().reshape(()).clone()  # a step may change a buffer that it logs
        self._numbers.setdefault(name, []).append(number)
        size = self.size if batch_size is None else batch_size
        self._weights.setdefault(name, []).append(float(size))
        self._reductions[name] = str(reduction)
        if size != self.size or reduction != "mean":
            self._own_means.add(name)

    def log_dict(
        self, dictionary: Mapping[str, Any] | MetricCollection, *args: Any, **kwargs: Any
    ) -> None:
        """Record each entry of a dict of values, or each metric of a collection."""
        if isinstance(dictionary, MetricCollection):
            for name in dictionary:
                self._begin_value(str(name))
                self._add_metric(str(name), (dictionary, str(name)))
            return
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)

    def values(self) -> dict[str, Tensor]:
        """Return the value of each name; NaN for a metric that is undefined for the samples."""
        values = {name: self._reduce(name) for name in self._numbers}
        for name, metric in self._metrics.items():
            value = _compute(_find_member(metric))
            if isinstance(value, dict):
                raise ValueError(
                    f"Expected the metric of self.log({name!r}, ...) to give one number but got a"
                    f" dict ({', '.join(map(str, value))}): log its entries by self.log_dict."
                )
            values[name] = torch.as_tensor(value).detach()
        for name, value in values.items():
            if value.numel() != 1:
                raise ValueError(
                    f"Expected the metric of self.log({name!r}, ...) to give one number but got"
                    f" shape {list(value.shape)}: set, for example, its argument `average: macro`."
                )
        return values

    def directions(self) -> dict[str, bool | None]:
        """Return whether larger values are better, for each metric of torchmetrics.

        A number that a metric of the module has computed, such as an entry of its dict of results,
        has the metric's direction, if that is known.
        """
        results = {name: metric_direction(metric) for name, metric in self._results.items()}
        directions: dict[str, bool | None] = {
            name: higher for name, higher in results.items() if higher is not None
        }
        for name, metric in self._metrics.items():
            directions[name] = metric_direction(_find_member(metric))
        return directions

    def _begin_value(self, name: str) -> None:
        """Forget the values of a name that another step or hook has logged."""
        if self._sources.setdefault(name, self.source) != self.source:
            self._sources[name] = self.source
            self._numbers.pop(name, None)
            self._weights.pop(name, None)
            self._metrics.pop(name, None)
            self._results.pop(name, None)

    def _add_metric(self, name: str, metric: Metric | tuple[MetricCollection, str]) -> None:
        """Record a metric of torchmetrics; refuse a name of another value."""
        if name in self._numbers or self._identity(name) not in (None, _identify(metric)):
            raise ValueError(_describe_second_value(name))
        self._metrics[name] = metric

    def _identity(self, name: str) -> tuple[int, str] | None:
        return _identify(self._metrics[name]) if name in self._metrics else None

    def _reduce(self, name: str) -> Tensor:
        values, reduction = self._numbers[name], self._reductions[name]
        if len(values) == 1:
            return values[0]
        like = next((value for value in values if not value.is_cpu), values[0])
        numbers = torch.stack([value.to(like.device, torch.float64) for value in values])
        if reduction == "mean":
            weights = numbers.new_tensor(self._weights[name])
            return (numbers * weights).sum() / weights.sum()
        if reduction == "sum":
            return numbers.sum()
        return numbers.amin() if reduction == "min" else numbers.amax()


def strip_stage(name: str, stage: str) -> str:
    """Return the name of a logged value without its own stage; other names stay as they are.

    Args:
        name: The name that a step logs.
        stage: ``train``, ``validation`` or ``test``.

    Example:
        >>> strip_stage("val_acc", "validation"), strip_stage("train/top-5", "train")
        ('acc', 'top-5')
        >>> strip_stage("train_acc", "validation"), strip_stage("val", "validation")
        ('train_acc', 'val')
    """
    return _STAGES[stage].sub("", name)


def name_metrics(logged: Mapping[str, Collection[str]]) -> dict[str, dict[str, str]]:
    """Return the metric of each logged value, for each stage.

    A name loses the prefix of its own stage, unless another logged name would then be equal to it.
    Then all of them stay as logged, in every stage. The order of the logs does not matter. A name
    that the steps of validation and test both log, as with ``test_step = validation_step``, loses
    the prefix of either stage.

    Args:
        logged: The names that the step of each stage logs.

    Example:
        >>> name_metrics({"validation": ["val_acc"], "test": ["test_acc"]})
        {'validation': {'val_acc': 'acc'}, 'test': {'test_acc': 'acc'}}
        >>> name_metrics({"validation": ["val_loss", "loss"], "test": ["test_loss"]})
        {'validation': {'val_loss': 'val_loss', 'loss': 'loss'}, 'test': {'test_loss': 'test_loss'}}
        >>> name_metrics({"validation": ["val_acc"], "test": ["val_acc"]})
        {'validation': {'val_acc': 'acc'}, 'test': {'val_acc': 'acc'}}
    """
    short_names = {
        stage: {name: strip_stage(name, stage) for name in names} for stage, names in logged.items()
    }
    for stage, other in (("validation", "test"), ("test", "validation")):
        own, others = short_names.get(stage, {}), short_names.get(other, {})
        for name in own.keys() & others.keys():
            if own[name] == name and others[name] not in own.values():
                own[name] = others[name]
    sources: dict[str, set[str]] = {}
    crowded: set[str] = set()
    for names in short_names.values():
        crowded |= {short for short, count in Counter(names.values()).items() if count > 1}
        for name, short in names.items():
            sources.setdefault(short, set()).add("as logged" if name == short else "without stage")
    crowded |= {short for short, kinds in sources.items() if len(kinds) > 1}
    return {
        stage: {name: name if short in crowded else short for name, short in names.items()}
        for stage, names in short_names.items()
    }


def _toggle_nothing(optimizer: Any) -> None:
    """Take the place of ``toggle_optimizer`` and ``untoggle_optimizer``."""


def _identify(metric: Metric | tuple[MetricCollection, str]) -> tuple[int, str]:
    return (id(metric[0]), metric[1]) if isinstance(metric, tuple) else (id(metric), "")


def _find_member(metric: Metric | tuple[MetricCollection, str]) -> Metric:
    """Return a metric, or the member of a collection: each member may be undefined by itself."""
    if not isinstance(metric, tuple):
        return metric
    collection, name = metric
    return dict(collection.items(copy_state=False))[name]


def _describe_second_value(name: str) -> str:
    return (
        f"Expected self.log({name!r}, ...) to log one value by this name but got a metric of"
        " torchmetrics and another value: use another name for one of them."
    )


def _compute(metric: Any) -> Any:
    """Return a metric's value; NaN if the metric refuses its samples.

    Raises:
        Exception: If the numbers of its states are unknown, as in a stack of clients or in a trace:
            then the metric does not support it, and an engine without it gives the value.
    """
    try:
        return compute_metric(metric)
    except UNDEFINED_ERRORS as error:
        if not _has_numbers(metric):
            raise
        raise_device_error(error, repeat_on_cpu(metric))
        return torch.tensor(torch.nan)


def _has_numbers(metric: Metric) -> bool:
    """Return whether the numbers of a metric's states can be read."""
    parts = [part for part in metric.modules() if isinstance(part, Metric)]
    try:
        for state in leaves([part.metric_state for part in parts]):
            state.flatten()[:1].tolist()
    except RuntimeError:
        return False
    return True
