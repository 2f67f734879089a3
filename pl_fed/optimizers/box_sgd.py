"""Projected gradient descent on a box.

A step of gradient descent, and then the projection on the box [low, high] of each number::

    w ← min(max(w − lr · ∇, low), high)

FedALA (J. Zhang et al., AAAI 2023, arXiv 2212.01197) learns its weights by it.
"""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from pl_fed.arguments import check_finite, check_nonnegative


class BoxSGD(Optimizer):
    """Box SGD: gradient descent with each number clipped to [low, high] after each step.

    Numbers outside of the box are moved into it by the first step that has a gradient for them.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate ≥ 0.
        low: The smallest value of a number.
        high: The largest value of a number, at least ``low``.

    Raises:
        ValueError: If ``lr`` is negative, an argument is infinite, or ``high`` is below ``low``.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([0.5, 0.5]))
        >>> optimizer = BoxSGD([weight], lr=1.0)
        >>> weight.grad = torch.tensor([0.25, 2.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([0.2500, 0.0000])
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1.0,
        low: float = 0.0,
        high: float = 1.0,
    ) -> None:
        check_nonnegative(lr=lr)
        check_finite(low=low, high=high)
        if high < low:
            raise ValueError(
                f"Expected argument `high` to be at least `low` = {low} but got {high}."
            )
        super().__init__(params, {"lr": lr, "low": low, "high": high})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; ``closure`` recomputes the loss and the gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])
                    parameter.clamp_(group["low"], group["high"])
        return loss
