"""The base of schedules over the local steps of a round."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


class LocalSchedule(LRScheduler):
    """Local schedule: learning rates over the local steps of each client's round.

    As ``model.lr_scheduler`` it steps once a round, like every schedule of pl_fed. Between two such
    steps it gives each local step its own rate, and every client goes through it by its own number
    of local steps. To write one, define :meth:`local_rates`.

    Args:
        optimizer: The local optimizer.
        rounds: Builds a schedule over rounds from the optimizer, which gives the rate of each round
            (``round_lr`` below). ``None`` keeps the optimizer's rate.

    Raises:
        TypeError: If ``rounds`` builds a schedule that reads a metric or is local itself.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rounds: Callable[[Optimizer], LRScheduler | ReduceLROnPlateau] | None = None,
    ) -> None:
        schedule = None if rounds is None else rounds(optimizer)
        if isinstance(schedule, ReduceLROnPlateau | LocalSchedule):
            raise TypeError(
                "Expected argument `rounds` to be a schedule of rounds without a metric but got"
                f" {type(schedule).__name__}."
            )
        self.rounds = schedule
        super().__init__(optimizer)

    @abstractmethod
    def local_rates(self, round_lr: float, steps: int, round: int, group: int) -> Sequence[float]:
        """Return the learning rate of each local step of a client in a round, [steps].

        Args:
            round_lr: The learning rate of the round.
            steps: The client's number of local steps on the model, at least 1.
            round: The round, from 0.
            group: The position of the parameter group in the optimizer.
        """

    @property
    def name(self) -> str:
        """The name of the schedule in messages."""
        return type(self).__name__

    def check_length(self, rounds: float, steps: int) -> None:
        """Refuse a schedule that ends before a run does; by default, none ends.

        Args:
            rounds: The number of rounds of the run; may be infinite.
            steps: The largest number of local steps of a client in a round.

        Raises:
            ValueError: If the schedule has too few rates.
        """

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each group for the next round."""
        if self.rounds is not None and self.last_epoch > 0:
            self.rounds.step()
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each group; within a local step, that of the step."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with that of the schedule over rounds."""
        state = {k: v for k, v in super().state_dict().items() if k != "rounds"}
        return state if self.rounds is None else {**state, "rounds": self.rounds.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Restore the state, and that of the schedule over rounds."""
        own = dict(state_dict)
        rounds = own.pop("rounds", None)
        if self.rounds is not None and rounds is not None:
            self.rounds.load_state_dict(rounds)
        super().load_state_dict(own)


def list_rates(build: Callable[[Optimizer], LRScheduler], lr: float, steps: int) -> list[float]:
    """Return the learning rates that a schedule of torch gives to some steps.

    Args:
        build: Builds the schedule from an optimizer.
        lr: The learning rate of the optimizer.
        steps: The number of steps.

    Example:
        >>> from torch.optim.lr_scheduler import ExponentialLR
        >>> list_rates(lambda optimizer: ExponentialLR(optimizer, 0.5), 1.0, 3)
        [1.0, 0.5, 0.25]
    """
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    schedule = build(optimizer)
    rates = []
    for step in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()  # else torch warns of an optimizer that never stepped
        if step < steps - 1:
            schedule.step()
    return rates
