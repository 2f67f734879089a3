"""The state of a local optimizer as a flat row, which clients keep between rounds."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.clients.contract import Objective
from pl_fed.clients.optimizer_memory import forgets_steps
from pl_fed.nets.rows import RowLayout
from pl_fed.random import fork_torch_rng

_REMEDY = "set `federation.engine.keep_optimizer_state: false`"


@dataclass(frozen=True)
class StateEntry:
    """State entry: a tensor or a number that an optimizer keeps for one parameter.

    Attributes:
        position: Position of the parameter in its model.
        name: Name of the entry in the optimizer's state, such as ``"exp_avg"``.
        shape: The shape of the entry.
        is_shared: Whether the entry is one number for all elements of a parameter, such as
            ``"step"``.
        kind: The dtype of a tensor, or the type of a number of Python.
        device: The device of a tensor; ``None`` for a number of Python.
    """

    position: int
    name: str
    shape: torch.Size
    is_shared: bool
    kind: Any
    device: torch.device | None

    @classmethod
    def from_value(cls, position: int, name: str, value: object, shape: torch.Size) -> "StateEntry":
        """Return the entry of a value in a state.

        Args:
            position: Position of the parameter in its model.
            name: Name of the entry.
            value: The value, for a trial parameter of the same shape, but of shape [1] in place of
                a single number.
            shape: The shape of the parameter.

        Raises:
            ValueError: If the value is neither a dense tensor nor a number.
        """
        if isinstance(value, int | float):
            return cls(position, name, torch.Size(), True, type(value), None)
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_complex():
            raise ValueError(
                "Expected a local optimizer that keeps real tensors and numbers for each parameter"
                f" but got {type(value).__name__} for `{name}`: {_REMEDY}."
            )
        is_number = not shape and value.shape == (1,)
        own_shape = shape if is_number else value.shape
        return cls(position, name, own_shape, not value.shape, value.dtype, value.device)


@dataclass(frozen=True)
class OptimizerLayout:
    """Optimizer layout: the positions of a local optimizer's state in a row of one model.

    The row has the tensors, the shared numbers, and one flag for each tensor and number: 1 if the
    state has it. In the row of a new client all flags are 0, and the optimizer begins with initial
    values of its own.

    Args:
        tensors: The entries with the numbers of single elements.
        shared: The entries with one number for all elements of a parameter.
    """

    tensors: tuple[StateEntry, ...]
    shared: tuple[StateEntry, ...]

    @property
    def entries(self) -> tuple[StateEntry, ...]:
        """All entries, in the order of their flags."""
        return self.tensors + self.shared

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the entries, sorted."""
        return tuple(sorted({entry.name for entry in self.entries}))

    @cached_property
    def _layout(self) -> RowLayout:
        return RowLayout.from_tensors(
            (f"{entry.position}.{entry.name}", torch.empty(entry.shape, device="meta"))
            for entry in self.tensors
        )

    @property
    def numel(self) -> int:
        """Length of the row."""
        return self._layout.numel + len(self.shared) + len(self.entries)

    def common_numbers(self, row: Tensor) -> Tensor:
        """Return the numbers that must be equal in a stack of clients: shared ones and flags.

        Args:
            row: [..., numel].

        Returns:
            A view, [..., numbers].
        """
        return row[..., self._layout.numel :]

    def load(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], row: Tensor) -> None:
        """Set the state of an optimizer's parameters from a row.

        Args:
            optimizer: The optimizer, without steps.
            parameters: The parameters of the model; of a stack, [clients, *shape] each.
            row: [numel]; or [clients, numel] of a stack of clients with equal
                :meth:`common_numbers`.
        """
        common = self.common_numbers(row)
        numbers: list[float] = (common[0] if common.dim() == 2 else common).tolist()
        shared, flags = numbers[: len(self.shared)], numbers[len(self.shared) :]
        values = [*self._layout.views(row).values(), *shared]
        for entry, value, flag in zip(self.entries, values, flags):
            if flag:
                state = optimizer.state[parameters[entry.position]]
                state[entry.name] = _restore(entry, value)

    def store(
        self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], row: Tensor
    ) -> None:
        """Write the state of an optimizer's parameters into a row of the shape of :meth:`load`.

        Raises:
            ValueError: If the state has an entry that is not in the layout.
        """
        self._check_names(optimizer, parameters)
        values = [
            optimizer.state.get(parameters[entry.position], {}).get(entry.name)
            for entry in self.entries
        ]
        for value, target in zip(values, self._layout.views(row).values()):
            if value is None:
                target.zero_()
            else:
                target.copy_(value)
        shared = [0.0 if value is None else float(value) for value in values[len(self.tensors) :]]
        flags = [float(value is not None) for value in values]
        self.common_numbers(row).copy_(torch.tensor([*shared, *flags], dtype=row.dtype))

    def _check_names(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
        entries = {(entry.position, entry.name) for entry in self.entries}
        for position, name, _ in _iterate_state(optimizer, parameters):
            if (position, name) not in entries:
                raise ValueError(
                    f"Expected {type(optimizer).__name__} to keep the same state in every step"
                    f" ({', '.join(self.names)}) but got `{name}` in a later one: {_REMEDY}."
                )


def find_optimizer_layouts(
    objective: Objective, parameters: Mapping[str, list[Tensor]]
) -> dict[str, OptimizerLayout]:
    """Return the layout of each trained model's optimizer state, found by one step of zeros.

    Models whose parameters have no state are left out.

    Args:
        objective: The objective; it builds the local optimizer.
        parameters: The parameters of each trained model; they do not change.

    Raises:
        ValueError: If the optimizer keeps other values than tensors and numbers for each parameter,
            or a step changes its options.
    """
    trials: dict[str, list[Tensor]] = {  # [1] tells a number's momentum from its count of steps
        model: [nn.Parameter(tensor.new_zeros(tensor.shape or (1,))) for tensor in tensors]
        for model, tensors in parameters.items()
    }
    own = [parameter for tensors in trials.values() for parameter in tensors]
    optimizer = objective.build_optimizer(trials)
    for parameter in own:
        parameter.grad = torch.zeros_like(parameter)
    options = copy.deepcopy(_list_options(optimizer))
    with fork_torch_rng(own[0].device):
        optimizer.step()
    _check_options(optimizer, options)
    if any(parameter not in set(own) for parameter in optimizer.state):
        raise ValueError(
            "Expected a local optimizer that keeps a state for each parameter alone but got"
            f" {type(optimizer).__name__}: {_REMEDY}."
        )

    def build(copies: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the optimizer of copies of all parameters."""
        remaining = iter(copies)
        models: dict[str, list[Tensor]] = {
            model: [next(remaining) for _ in tensors] for model, tensors in trials.items()
        }
        return objective.build_optimizer(models)

    if forgets_steps(build, [parameter.shape for parameter in own]):
        raise ValueError(
            f"Expected a local optimizer whose `state_dict` has all that it remembers but"
            f" {type(optimizer).__name__} keeps other values from one step to the next: {_REMEDY}."
        )
    layouts = {}
    for model, tensors in trials.items():
        entries = [
            StateEntry.from_value(position, name, value, parameters[model][position].shape)
            for position, name, value in _iterate_state(optimizer, tensors)
        ]
        if entries:
            layouts[model] = OptimizerLayout(
                tuple(entry for entry in entries if not entry.is_shared),
                tuple(entry for entry in entries if entry.is_shared),
            )
    return layouts


def _list_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _check_options(optimizer: torch.optim.Optimizer, before: list[dict[str, Any]]) -> None:
    """Refuse an optimizer whose step has changed options: they restart in each round."""
    for own, group in zip(before, _list_options(optimizer)):
        for name, value in group.items():
            if name not in own or own[name] != value:
                raise ValueError(
                    "Expected a local optimizer that keeps its state for each parameter but"
                    f" {type(optimizer).__name__} counts in the option `{name}` of its parameter"
                    f" groups: {_REMEDY}."
                )


def _restore(entry: StateEntry, value: Any) -> Any:
    """Return a new value of a state, from a part of a row."""
    if isinstance(value, Tensor):
        return value.to(entry.device, entry.kind, copy=True)
    if entry.device is None:
        return entry.kind(value)
    return torch.tensor(value, dtype=entry.kind, device=entry.device)


def _iterate_state(
    optimizer: torch.optim.Optimizer, parameters: list[Tensor]
) -> Iterator[tuple[int, str, object]]:
    """Yield position, name and value of all entries of the parameters' state, without ``None``."""
    for position, parameter in enumerate(parameters):
        for name, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                yield position, name, value
