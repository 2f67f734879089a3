"""The options of optimizers: a guard that restores what a client's steps change in them."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

from pl_fed.clients.base import Client


class OptionGuard:
    """Option guard: restores the options of optimizers, such as learning rates.

    Args:
        optimizers: The optimizers.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> guard = OptionGuard([optimizer])
        >>> optimizer.param_groups[0]["lr"] = 0.5
        >>> guard.restore()
        ['lr']
        >>> optimizer.param_groups[0]["lr"]
        0.1
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._before = [
            (group, {name: _copy(value) for name, value in group.items() if name != "params"})
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]

    @classmethod
    def guard_trainer(cls, client: Client) -> "OptionGuard":
        """Return a guard of the optimizers of an algorithm's trainer; of none without a trainer."""
        with suppress(RuntimeError):  # the algorithm has no trainer
            return cls(getattr(client.trainer, "optimizers", ()))
        return cls([])

    def restore(self) -> list[str]:
        """Restore all options, and return the names of the changed ones."""
        changed = []
        for group, before in self._before:
            for name, value in before.items():
                if (current := group.get(name)) is not value and _differ(current, value):
                    changed.append(name)
                    group[name] = value
        return list(dict.fromkeys(changed))


def _copy(value: Any) -> Any:
    """Return a copy of a tensor, such as the rate of a capturable optimizer; others stay."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _differ(value: Any, other: Any) -> bool:
    """Return whether two values of an option differ."""
    return type(value) is not type(other) or bool(value != other)
