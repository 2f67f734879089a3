"""Cosine annealing over the local steps of a round, with a linear warm-up."""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pl_fed.arguments import check_shares
from pl_fed.optimizers.local_schedule import LocalSchedule


class LocalCosine(LocalSchedule):
    """Local cosine: cosine annealing over a client's local steps, anew in each round.

    With η the rate of the round, S local steps and W = ⌊warmup · S + ½⌋ of them in the warm-up,
    step s = 0..S−1 has the rate::

        η (s + 1) / (W + 1)                                               for s < W
        η (final + (1 − final) (1 + cos(π (s − W) / (S − W))) / 2)        for s ≥ W

    Without warm-up this is ``torch.optim.lr_scheduler.CosineAnnealingLR(T_max=S)`` (Loshchilov and
    Hutter, "SGDR", ICLR 2017, equation 5, with a restart in each round).

    Args:
        optimizer: The local optimizer.
        final: The rate that the annealing approaches, as a share of η, in [0, 1].
        warmup: Share of the local steps in the warm-up, in [0, 1].
        rounds: Builds a schedule over rounds, which gives η; ``None`` for the optimizer's rate.

    Raises:
        ValueError: If ``final`` or ``warmup`` is out of range.

    Example:
        >>> import torch
        >>> schedule = LocalCosine(torch.optim.SGD([torch.zeros(1)], lr=1.0))
        >>> [round(rate, 2) for rate in schedule.local_rates(1.0, 4, 0, 0)]
        [1.0, 0.85, 0.5, 0.15]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        final: float = 0.0,
        warmup: float = 0.0,
        rounds: Callable[[Optimizer], LRScheduler | ReduceLROnPlateau] | None = None,
    ) -> None:
        check_shares(final=final, warmup=warmup)
        self.final = final
        self.warmup = warmup
        super().__init__(optimizer, rounds)

    def local_rates(self, round_lr: float, steps: int, round: int, group: int) -> list[float]:
        """Return the learning rate of each local step, [steps]."""
        first = math.floor(self.warmup * steps + 0.5)
        rises = [(step + 1) / (first + 1) for step in range(first)]
        length = steps - first
        falls = [
            self.final + (1 - self.final) * (1 + math.cos(math.pi * step / length)) / 2
            for step in range(length)
        ]
        return [round_lr * factor for factor in (*rises, *falls)]
