"""The local optimizer of a LightningModule: the one that ``configure_optimizers`` returns."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from pl_fed.clients.contract import model_of_group
from pl_fed.clients.module_schedule import (
    ModuleSchedule,
    count_local_steps,
    read_schedule,
    refuse_counts_of_batches,
)
from pl_fed.nets.gradient_hooks import list_step_hooks
from pl_fed.nets.rows import trainable_parameters
from pl_fed.text import first_line

_NO_OPTIONS = ("params", "param_names", "name", "initial_lr")
_PLAIN = (bool, int, float, str, type(None), FunctionType)


class ModuleOptimizer:
    """Module optimizer: builds local optimizers like that of ``configure_optimizers``.

    It calls ``configure_optimizers`` when a trainer has set up the federation. Local optimizers
    have the same class, options, plain attributes and hooks, and parameters of other models. If the
    module's optimizer has several parameter groups, each model has as many: the groups of model
    ``"x"`` are named ``"x.0"``, ``"x.1"``, ...

    Args:
        module: A LightningModule with ``configure_optimizers``.
        schedules: Whether the module's schedule is that of the local optimizer; otherwise it is
            ignored.
    """

    def __init__(self, module: nn.Module, schedules: bool = True) -> None:
        self.module = module
        self.schedules = schedules
        self._example: _Example | None = None
        self._has_informed = False

    def describe(self) -> str:
        """Return the class of the module's optimizer with the options that differ from defaults."""
        if self._example is None:
            self._example = self._configure()
        optimizer = self._example.optimizer
        defaults = inspect.signature(type(optimizer)).parameters
        options = [
            f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in optimizer.param_groups[0].items()
            if name in defaults and name not in _NO_OPTIONS and value != defaults[name].default
        ]
        return f"{type(optimizer).__name__}({', '.join(options)}) of the module"

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        """Build a local optimizer.

        Args:
            parameters: Parameters or parameter groups.

        Raises:
            ValueError: If the module has several optimizers or schedules.
        """
        if self._example is None:
            self._example = self._configure()
        example = self._example
        parts = list(parameters)
        if parts and not isinstance(parts[0], Mapping):
            parts = [{"params": parts}]
        return example.build([group for part in parts for group in example.split(part)])

    def restart(self) -> None:
        """Call ``configure_optimizers`` again for the next optimizer, as at the start of a fit."""
        self._example = None

    def build_schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
        """Return a schedule of a local optimizer; ``None`` without one.

        It steps once a round, or goes through the local steps if the module's schedule has
        ``interval: step``.
        """
        example = self._example
        if example is None or example.schedule is None:
            return None
        sources = [group.index for group in example.groups]
        return example.schedule.follow(optimizer, sources, self.module)

    def _configure(self) -> "_Example":
        name = type(self.module).__name__
        optimizer, schedules = self._call_module(name)
        schedule = read_schedule(name, schedules) if self.schedules else None
        if schedule is not None and schedule.interval == "step":
            with count_local_steps(self.module):  # it may have read the number of all steps
                optimizer, schedules = self._call_module(name)
            schedule = read_schedule(name, schedules)
        _check_parameters(name, self.module, optimizer)
        if not self._has_informed:
            self._has_informed = True
            rank_zero_info(
                f"The local optimizer is {type(optimizer).__name__} of {name}.configure_optimizers:"
                " `model.optimizer` replaces it, unless it is the default, SGD with lr 0.05."
            )
        return _read_example(self.module, optimizer, schedule)

    def _call_module(self, name: str) -> tuple[torch.optim.Optimizer, list[Any]]:
        """Return the optimizer and the schedules of ``configure_optimizers``."""
        with refuse_counts_of_batches(self.module):
            result = self.module.configure_optimizers()  # type: ignore[operator]
        if result is None:
            raise ValueError(
                f"Expected `configure_optimizers` of {name} to return an optimizer but got None."
            )
        return _unpack(name, result)


@dataclass(frozen=True)
class _ExampleGroup:
    """Example group: a parameter group of a module's optimizer.

    Attributes:
        index: Position of the group in the optimizer.
        positions: Positions of its parameters among the module's trainable parameters.
        options: The entries of the group besides its parameters and name.
    """

    index: int
    positions: tuple[int, ...]
    options: dict[str, Any]

    def copy_options(self) -> dict[str, Any]:
        """Return the options, for a group of its own."""
        return {name: _copy(value) for name, value in self.options.items()}


@dataclass(frozen=True)
class _Example:
    """Example: the optimizer of a module.

    A copy of an optimizer lacks its own attributes and hooks, so they are kept beside it.

    Attributes:
        optimizer: The optimizer that ``configure_optimizers`` returned.
        schedule: Its schedule, or ``None``.
        groups: Its parameter groups with a trainable parameter.
        module_name: The class of the module, for messages.
        arguments: The arguments of the optimizer's class.
        hooks: The hooks before and those after its steps.
        attributes: Plain attributes that the class alone does not set to the same values.
    """

    optimizer: torch.optim.Optimizer
    schedule: ModuleSchedule | None
    groups: tuple[_ExampleGroup, ...]
    module_name: str
    arguments: dict[str, Any]
    hooks: tuple[list[Any], list[Any]]
    attributes: dict[str, Any] = field(default_factory=dict)

    def split(self, part: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Split the parameter group of a model like those of the module.

        Args:
            part: The group, with all trainable parameters of the model, and options of its own.
        """
        if len(self.groups) == 1:
            return [{**self.groups[0].copy_options(), **part}]
        parameters = list(part["params"])
        groups = []
        for place, group in enumerate(self.groups):
            own: dict[str, Any] = {"params": [parameters[position] for position in group.positions]}
            if "name" in part:
                own["name"] = f"{part['name']}.{place}"
            groups.append({**group.copy_options(), **part, **own})
        return groups

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return an optimizer of parameter groups, with the attributes and hooks of the module's.

        Args:
            groups: Groups with their options, as :meth:`split` returns them.
        """
        kind, arguments = type(self.optimizer), self.arguments.items()
        try:
            optimizer = kind(groups, **{name: _copy(value) for name, value in arguments})
        except Exception as error:
            raise ValueError(
                f"Expected {kind.__name__} of {self.module_name}.configure_optimizers to be built"
                f" from parameter groups and its options but that failed ({first_line(error)}):"
                " keep its arguments as attributes of the same names, or set `model.optimizer`."
            ) from error
        vars(optimizer).update(self.attributes)
        before, after = self.hooks
        for hook in before:
            optimizer.register_step_pre_hook(_call_for_each_model(hook))
        for hook in after:
            optimizer.register_step_post_hook(_call_for_each_model(hook))
        return optimizer


def _read_example(
    module: nn.Module, optimizer: torch.optim.Optimizer, schedule: ModuleSchedule | None
) -> _Example:
    """Return the example of a module's optimizer."""
    own = {**vars(optimizer), **getattr(optimizer, "defaults", {})}
    _, *names = inspect.signature(type(optimizer)).parameters
    example = _Example(
        optimizer,
        schedule,
        _read_groups(module, optimizer),
        type(module).__name__,
        {name: own[name] for name in names if name in own},
        list_step_hooks(optimizer),
    )
    built = example.build(example.split({"params": [*trainable_parameters(module).values()]}))
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, _PLAIN) and getattr(built, name, None) != value
        if not hasattr(type(built), name)  # a schedule replaces the method `step`
    }
    return replace(example, attributes=attributes)


def _copy(value: Any) -> Any:
    """Return a copy of a tensor: a schedule changes a rate in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _call_for_each_model(hook: Callable[..., Any]) -> Callable[..., None]:
    """Return a hook that is called for each model, with an optimizer of its groups alone."""

    def call(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
        """Call the hook."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for group in optimizer.param_groups:
            groups.setdefault(model_of_group(group), []).append(group)
        for own in groups.values():
            part = copy.copy(optimizer)
            vars(part).update({**vars(optimizer), "param_groups": own})
            hook(part, arguments, options)

    return call


def names_no_optimizer(optimizer: Callable[[Any], Any]) -> bool:
    """Return whether an argument ``optimizer`` is the default: SGD with learning rate 0.05.

    A function of the user's own counts as an optimizer that the user has chosen. A config cannot
    tell the default from the same optimizer by name; an option such as ``foreach: false`` does.
    """
    function = getattr(optimizer, "func", optimizer)  # of a partial, as a config gives it
    package = (getattr(function, "__module__", None) or "").split(".")[0]
    if package not in ("pl_fed", "jsonargparse"):
        return False
    parameter = nn.Parameter(torch.zeros(1))
    try:
        built = optimizer([parameter])
    except Exception:  # another check refuses the function
        return False
    default = torch.optim.SGD([parameter], lr=0.05)
    return type(built) is torch.optim.SGD and built.defaults == default.defaults


def _unpack(name: str, result: Any) -> tuple[torch.optim.Optimizer, list[Any]]:
    """Return the optimizer and the schedules in the result of ``configure_optimizers``."""
    optimizers: Any
    schedules: Any = []
    if isinstance(result, Mapping):
        optimizers, schedules = [result["optimizer"]], [result.get("lr_scheduler")]
    elif isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], list | tuple):
        optimizers, schedules = result
    else:
        optimizers = result if isinstance(result, list | tuple) else [result]
    if len(optimizers) == 1 and isinstance(optimizers[0], Mapping):
        return _unpack(name, optimizers[0])
    if len(optimizers) != 1:
        raise ValueError(
            f"Expected `configure_optimizers` of {name} to return one optimizer but got"
            f" {len(optimizers)}: use one optimizer, or set `model.optimizer`."
        )
    return optimizers[0], [schedule for schedule in schedules if schedule is not None]


def _check_parameters(name: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of a part of the trainable parameters."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for parameter_name, parameter in trainable_parameters(module).items():
        if id(parameter) not in own:
            raise ValueError(
                f"Expected the optimizer of {name}.configure_optimizers to have all trainable"
                f" parameters but got one without `{parameter_name}`: set its requires_grad=False"
                " to freeze it."
            )


def _read_groups(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[_ExampleGroup, ...]:
    """Return the parameter groups of a module's optimizer with a trainable parameter."""
    places = {id(p): place for place, p in enumerate(trainable_parameters(module).values())}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        positions = tuple(places[id(p)] for p in group["params"] if id(p) in places)
        options = {key: value for key, value in group.items() if key not in _NO_OPTIONS}
        if "initial_lr" in group:  # the schedule may have changed the rate
            options["lr"] = group["initial_lr"]
        if positions:
            groups.append(_ExampleGroup(index, positions, options))
    return tuple(groups)
