"""The local optimizer of a LightningModule: the one that ``configure_optimizers`` returns."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from pl_fed.clients.module_schedule import ModuleSchedule, read_schedule
from pl_fed.nets.rows import trainable_parameters

_NO_OPTIONS = ("params", "name", "initial_lr")


class ModuleOptimizer:
    """Module optimizer: builds local optimizers like that of ``configure_optimizers``.

    It calls ``configure_optimizers`` when a trainer has set up the federation. Local optimizers
    have the same class and options, and parameters of other models. If the module's optimizer has
    several parameter groups, each model has as many: the groups of model ``"x"`` are named
    ``"x.0"``, ``"x.1"``, ...

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
            f"{name}={value}"
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
        groups = [group for part in parts for group in example.split(part)]
        own_options = [set(group) for group in groups]  # torch adds defaults to the groups
        optimizer = type(example.optimizer)(groups, **example.groups[0].arguments)
        options = [group.options for group in example.groups] * len(parts)
        for group, own, defaults in zip(optimizer.param_groups, own_options, options):
            group.update({k: v for k, v in defaults.items() if k not in own})
        return optimizer

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
        return example.schedule.follow(optimizer, sources, type(self.module).__name__)

    def _configure(self) -> "_Example":
        name = type(self.module).__name__
        result = self.module.configure_optimizers()  # type: ignore[operator]
        if result is None:
            raise ValueError(
                f"Expected `configure_optimizers` of {name} to return an optimizer but got None."
            )
        optimizer, schedules = _unpack(name, result)
        schedule = read_schedule(name, schedules) if self.schedules else None
        _check_parameters(name, self.module, optimizer)
        if not self._has_informed:
            self._has_informed = True
            rank_zero_info(
                f"The local optimizer is {type(optimizer).__name__} of {name}.configure_optimizers:"
                " `model.optimizer` replaces it, unless it is the default, SGD with lr 0.05."
            )
        return _Example(optimizer, schedule, _read_groups(self.module, optimizer))


@dataclass(frozen=True)
class _ExampleGroup:
    """Example group: a parameter group of a module's optimizer.

    Attributes:
        index: Position of the group in the optimizer.
        positions: Positions of its parameters among the module's trainable parameters.
        options: The entries of the group besides its parameters and name.
        arguments: The entries that are arguments of the optimizer's class.
    """

    index: int
    positions: tuple[int, ...]
    options: dict[str, Any]
    arguments: dict[str, Any]


@dataclass(frozen=True)
class _Example:
    """Example: the optimizer of a module.

    Attributes:
        optimizer: The optimizer that ``configure_optimizers`` returned.
        schedule: Its schedule, or ``None``.
        groups: Its parameter groups with a trainable parameter.
    """

    optimizer: torch.optim.Optimizer
    schedule: ModuleSchedule | None
    groups: tuple[_ExampleGroup, ...]

    def split(self, part: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Split the parameter group of a model like those of the module.

        Args:
            part: The group, with all trainable parameters of the model, and options of its own.
        """
        if len(self.groups) == 1:
            return [dict(part)]
        parameters = list(part["params"])
        groups = []
        for place, group in enumerate(self.groups):
            own: dict[str, Any] = {"params": [parameters[position] for position in group.positions]}
            if "name" in part:
                own["name"] = f"{part['name']}.{place}"
            groups.append({**part, **own})
        return groups


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
    accepted = inspect.signature(type(optimizer)).parameters
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        positions = tuple(places[id(p)] for p in group["params"] if id(p) in places)
        options = {key: value for key, value in group.items() if key not in _NO_OPTIONS}
        if "initial_lr" in group:  # the schedule may have changed the rate
            options["lr"] = group["initial_lr"]
        arguments = {key: value for key, value in options.items() if key in accepted}
        if positions:
            groups.append(_ExampleGroup(index, positions, options, arguments))
    return tuple(groups)
