"""The one-cycle schedule over the local steps of a round."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from pl_fed.arguments import check_choice, check_interval
from pl_fed.optimizers.local_schedule import LocalSchedule, list_rates


class LocalOneCycle(LocalSchedule):
    """Local one-cycle: a client's rate rises to that of the round and falls again, in each round.

    It has the rates of ``torch.optim.lr_scheduler.OneCycleLR`` (Smith and Topin, arXiv 1708.07120)
    with ``max_lr`` = the rate of the round and ``total_steps`` = the client's local steps. Momentum
    stays constant.

    Args:
        optimizer: The local optimizer.
        pct_start: Share of the steps in which the rate rises, in (0, 1).
        div_factor: The peak divided by the first rate, above 0.
        final_div_factor: The first rate divided by the last one, above 0.
        anneal_strategy: ``"cos"`` or ``"linear"``.
        rounds: Builds a schedule over rounds, which gives the peaks; ``None`` for the optimizer's
            rate.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> import torch
        >>> schedule = LocalOneCycle(torch.optim.SGD([torch.zeros(1)], lr=1.0), pct_start=0.5)
        >>> [round(rate, 3) for rate in schedule.local_rates(1.0, 4, 0, 0)]
        [0.04, 1.0, 0.5, 0.0]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        pct_start: float = 0.3,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        rounds: Callable[[Optimizer], LRScheduler | ReduceLROnPlateau] | None = None,
    ) -> None:
        check_interval("(0, 1)", pct_start=pct_start)
        check_choice(("cos", "linear"), anneal_strategy=anneal_strategy)
        for name, factor in (("div_factor", div_factor), ("final_div_factor", final_div_factor)):
            if not factor > 0:
                raise ValueError(f"Expected argument `{name}` to be above 0 but got {factor}.")
        self.pct_start = pct_start
        self.div_factor = div_factor
        self.final_div_factor = final_div_factor
        self.anneal_strategy = anneal_strategy
        super().__init__(optimizer, rounds)

    def local_rates(self, round_lr: float, steps: int, round: int, group: int) -> list[float]:
        """Return the learning rate of each local step, [steps]; of a single step, the round's."""
        if steps == 1:
            return [round_lr]
        pct_start = self.pct_start
        if pct_start * steps == 1:  # torch would divide by the length 0 of the rise
            pct_start = math.nextafter(pct_start, 0)
        return _list_rates(
            round_lr,
            steps,
            pct_start,
            self.div_factor,
            self.final_div_factor,
            self.anneal_strategy,
        )


@lru_cache(maxsize=256)
def _list_rates(
    peak: float,
    steps: int,
    pct_start: float,
    div_factor: float,
    final_div_factor: float,
    anneal_strategy: Literal["cos", "linear"],
) -> list[float]:
    """Return the rates of ``OneCycleLR``; the arguments are those of :class:`LocalOneCycle`."""
    build = partial(
        OneCycleLR,
        max_lr=peak,
        total_steps=steps,
        pct_start=pct_start,
        anneal_strategy=anneal_strategy,
        cycle_momentum=False,
        div_factor=div_factor,
        final_div_factor=final_div_factor,
    )
    return list_rates(build, peak, steps)
