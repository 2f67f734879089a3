"""The schedule of a LightningModule: the one that ``configure_optimizers`` returns."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import cycle
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pl_fed.optimizers import LocalSchedule


@dataclass(frozen=True)
class ModuleSchedule:
    """Module schedule: a schedule with its own optimizer, and when it steps.

    Attributes:
        schedule: The schedule.
        interval: ``"epoch"``, which is a round, or ``"step"``, a local step.
        frequency: It steps after so many local steps; 1 for rounds.
    """

    schedule: LRScheduler
    interval: str
    frequency: int

    def follow(
        self, optimizer: torch.optim.Optimizer, sources: Sequence[int], module: nn.Module
    ) -> LRScheduler:
        """Return a schedule of a local optimizer with these learning rates.

        Args:
            optimizer: The local optimizer.
            sources: For each group of a model, the position of the group that it follows.
            module: The module.
        """
        if self.interval == "epoch":
            return _FollowingSchedule(optimizer, self.schedule, list(sources))
        return _StepSchedule(optimizer, self.schedule, sources, self.frequency, module)


def count_local_steps(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the steps of a module's trainer are the local steps of a client.

    ``estimated_stepping_batches`` is otherwise the number of rounds, for schedules of epochs.
    """
    with suppress(RuntimeError):  # the module has no trainer
        trainer: Any = module.trainer
        return getattr(trainer, "count_local_steps", nullcontext)()  # type: ignore[no-any-return]
    return nullcontext()


@contextmanager
def refuse_counts_of_batches(module: nn.Module) -> Iterator[None]:
    """Refuse reads of dataloaders within the context: no length is that of a client's minibatches.

    The trainer's dataloader has an entry for each client, and that of a module has all samples. A
    schedule of steps would have other numbers of steps than a client takes.

    Args:
        module: A LightningModule, whose ``configure_optimizers`` runs within the context.

    Raises:
        ValueError: At such a read.
    """

    def refuse(*_: Any) -> None:
        """Refuse a read."""
        raise ValueError(
            f"Expected `configure_optimizers` of {type(module).__name__} to read its number of"
            " steps from `self.trainer.estimated_stepping_batches` but got one that reads a"
            " dataloader, whose length is not the number of a client's minibatches."
        )

    trainer = getattr(module, "_trainer", None)
    readers = (
        (module, "train_dataloader"),
        (getattr(trainer, "datamodule", None), "train_dataloader"),
        (getattr(trainer, "fit_loop", None), "setup_data"),
    )
    with ExitStack() as patches:
        for owner, name in readers:
            if hasattr(owner, name):
                patches.enter_context(mock.patch.object(owner, name, refuse))
        yield


def read_schedule(name: str, schedules: Sequence[Any]) -> ModuleSchedule | None:
    """Return the schedule of a module; ``None`` without one.

    Args:
        name: The name of the module, for messages.
        schedules: The schedules that ``configure_optimizers`` returned, with their options.

    Raises:
        ValueError: If there are several, or the schedule reads a metric or changes momentum.
    """
    if not schedules:
        return None
    if len(schedules) > 1:
        raise ValueError(
            f"Expected `configure_optimizers` of {name} to return one lr_scheduler but got"
            f" {len(schedules)}: use one, or set `model.lr_scheduler`."
        )
    first = schedules[0]
    options = first if isinstance(first, Mapping) else {"scheduler": first}
    scheduler = options.get("scheduler")
    interval, frequency = options.get("interval", "epoch"), options.get("frequency", 1)
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        raise ValueError(
            f"Expected `lr_scheduler` of {name}.configure_optimizers to be a schedule of epochs or"
            f" steps but got {type(scheduler).__name__}: set `model.lr_scheduler` instead."
        )
    if interval not in ("epoch", "step") or (interval == "epoch" and frequency != 1):
        raise ValueError(
            f"Expected `lr_scheduler` of {name}.configure_optimizers to have interval step, or"
            f" interval epoch and frequency 1, but got {interval} and {frequency}, since a schedule"
            " of epochs steps once a round: set `model.lr_scheduler` instead."
        )
    if interval == "step" and getattr(scheduler, "cycle_momentum", False):
        raise ValueError(
            f"Expected `lr_scheduler` of {name}.configure_optimizers to change the learning rate"
            f" alone but got {type(scheduler).__name__} with cycle_momentum: set"
            " cycle_momentum=False."
        )
    return ModuleSchedule(scheduler, interval, frequency)


class _StepSchedule(LocalSchedule):
    """Step schedule: gives local steps the learning rates of a module's schedule of steps.

    A client's local step s of round t, of S in each round, is step t·S + s of the schedule: as if
    the client had taken part in all rounds. The rate of a group changes by the same factor as that
    of the module's optimizer.

    Args:
        optimizer: The local optimizer.
        schedule: The module's schedule, with an optimizer of its own.
        sources: For each group of a model, the position of the group that it follows.
        frequency: The number of local steps before each of its steps.
        module: The module.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: LRScheduler,
        sources: Sequence[int],
        frequency: int,
        module: nn.Module,
    ) -> None:
        self._schedule = schedule
        self._sources = sources
        self._frequency = frequency
        self._module = module
        groups = schedule.optimizer.param_groups
        self._initial = [float(group["initial_lr"]) for group in groups]
        self._rates = [[float(group["lr"]) for group in groups]]  # after each step, of each group
        super().__init__(optimizer)

    @property
    def name(self) -> str:
        """The name of the module's schedule in messages."""
        return f"{type(self._schedule).__name__} with `interval: step`"

    def state_dict(self) -> dict[str, Any]:
        """Return the state; the module's schedule is stepped anew after a resume."""
        own = ("_schedule", "_sources", "_frequency", "_module", "_initial", "_rates")
        return {k: v for k, v in super().state_dict().items() if k not in own}

    def local_rates(self, round_lr: float, steps: int, round: int, group: int) -> list[float]:
        """Return the learning rate of each local step of a client in a round, [steps]."""
        source = self._sources[group % len(self._sources)]
        initial, first = self._initial[source], round * steps
        self._advance((first + steps - 1) // self._frequency)
        rates = [self._rates[(first + step) // self._frequency][source] for step in range(steps)]
        if round_lr == initial or not initial:
            return rates
        return [round_lr * rate / initial for rate in rates]

    def check_length(self, rounds: float, steps: int) -> None:
        """Refuse a schedule that ends before the last local step of a run."""
        if not math.isfinite(rounds) or not steps:
            return
        last, name = (int(rounds) * steps - 1) // self._frequency, type(self._module).__name__
        try:
            self._advance(last)
        except ValueError as error:
            raise ValueError(
                f"Expected `lr_scheduler` of {name}.configure_optimizers to have a rate for"
                f" each of the {last + 1} local steps of a client in {int(rounds)} rounds but got"
                f" {type(self._schedule).__name__} for {len(self._rates)}: give it total_steps="
                "self.trainer.estimated_local_steps, or interval epoch."
            ) from error

    def _advance(self, steps: int) -> None:
        """Step the module's schedule until it has taken so many steps."""
        optimizer = self._schedule.optimizer
        with warnings.catch_warnings(), count_local_steps(self._module):
            warnings.simplefilter("ignore")  # its optimizer takes no steps
            while len(self._rates) <= steps:
                self._schedule.step()
                self._rates.append([float(group["lr"]) for group in optimizer.param_groups])


class _FollowingSchedule(LRScheduler):
    """Following schedule: copies the options of another schedule's optimizer to a local optimizer.

    The rate of a group changes by the same factor as that of the other schedule's optimizer. Other
    options, such as the momentum of ``OneCycleLR``, get its values, where they have been equal.

    Args:
        optimizer: The local optimizer. Each model has as many groups as ``sources`` has numbers.
        schedule: The schedule, with an optimizer of its own.
        sources: For each group of a model, the position of the group that it follows.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: LRScheduler, sources: list[int]
    ) -> None:
        self.schedule = schedule
        self.sources = sources
        self.taken_steps = 0
        self._options = self._list_options()
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each group, after a step of the other schedule."""
        if self.last_epoch > self.taken_steps:
            self.taken_steps = self.last_epoch
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the other optimizer takes no steps
                self.schedule.step()
            self._follow_options()
        rates = []
        for base, source in zip(self.base_lrs, cycle(self.sources)):
            group = self.schedule.optimizer.param_groups[source]
            initial, rate = group["initial_lr"], group["lr"]
            rates.append(rate if base == initial or not initial else base * rate / initial)
        return rates

    def _list_options(self) -> list[dict[str, Any]]:
        """Return the plain options of the other schedule's optimizer, apart from the rates."""
        return [
            {
                name: value
                for name, value in group.items()
                if name not in ("lr", "initial_lr") and isinstance(value, int | float | tuple)
            }
            for group in self.schedule.optimizer.param_groups
        ]

    def _follow_options(self) -> None:
        """Copy changed options, but for groups with other values of their own."""
        before, self._options = self._options, self._list_options()
        for group, source in zip(self.optimizer.param_groups, cycle(self.sources)):
            for name, value in self._options[source].items():
                if value != (old := before[source].get(name)) and group.get(name) == old:
                    group[name] = value

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with that of the other schedule."""
        own = ("schedule", "sources")
        state = {k: v for k, v in super().state_dict().items() if k not in own}
        rates = [group["lr"] for group in self.schedule.optimizer.param_groups]
        return {**state, "schedule": self.schedule.state_dict(), "schedule_lr": rates}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Restore the state, and that of the other schedule."""
        own = dict(state_dict)
        self.schedule.load_state_dict(own.pop("schedule"))
        rates = own.pop("schedule_lr")
        rates = rates if isinstance(rates, list) else [rates]  # one, in older checkpoints
        for group, rate in zip(self.schedule.optimizer.param_groups, rates):
            group["lr"] = rate
        super().load_state_dict(own)
        for group, options in zip(self.schedule.optimizer.param_groups, self._options):
            group.update(options)
