"""Yogi: the server optimizer of FedYogi.

S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konečný, S. Kumar and H. B. McMahan,
"Adaptive Federated Optimization", ICLR 2021, arXiv 2003.00295, Algorithm 2, after M. Zaheer, S. J.
Reddi, D. Sachan, S. Kale and S. Kumar, "Adaptive Methods for Nonconvex Optimization", NeurIPS 2018.
The pseudo-gradient g = −Δ replaces the gradient::

    m ← β₁ m + (1 − β₁) g
    v ← v − (1 − β₂) g² sign(v − g²)
    w ← w − lr · m / (√v + eps)

As in Algorithm 2, there is no bias correction.
"""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer


class Yogi(Optimizer):
    """Yogi: Adam with the second moment v ← v − (1 − β₂) g² sign(v − g²).

    Source: Reddi et al., ICLR 2021, Algorithm 2. The size of a step of v is proportional to g², not
    to v − g² as in Adam. Therefore v decreases slowly when the gradients become small, and the
    effective learning rate does not jump up.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate, the paper's η, above 0.
        betas: Decay rates (β₁, β₂) of the two moments, both in [0, 1); the paper uses (0.9, 0.99).
        eps: The paper's τ, the degree of adaptivity, above 0.
        initial_accumulator: v before the first step, at least 0. ``None`` uses eps², the smallest
            value that Algorithm 2 allows (1e-6 with the default eps).

    Raises:
        ValueError: If an argument is out of range.
        RuntimeError: If :meth:`step` receives a sparse gradient.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = Yogi([weight], lr=0.1)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> weight.data
        tensor([-0.0990])
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-3,
        initial_accumulator: float | None = None,
    ) -> None:
        if not lr > 0:
            raise ValueError(f"Expected argument `lr` to be greater than 0 but got {lr}.")
        if not (0 <= betas[0] < 1 and 0 <= betas[1] < 1):
            raise ValueError(f"Expected argument `betas` to be both in [0, 1) but got {betas}.")
        if not eps > 0:
            raise ValueError(f"Expected argument `eps` to be greater than 0 but got {eps}.")
        if initial_accumulator is None:
            initial_accumulator = eps**2
        if not initial_accumulator >= 0:
            raise ValueError(
                "Expected argument `initial_accumulator` to be at least 0 "
                f"but got {initial_accumulator}."
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "initial_accumulator": initial_accumulator,
        }
        super().__init__(params, defaults)

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
                    self._update_parameter(parameter, group)
        return loss

    def _update_parameter(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            raise RuntimeError(f"Expected gradients of Yogi to be dense but got {gradient}.")
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.full_like(parameter, group["initial_accumulator"])
        first, second = state["exp_avg"], state["exp_avg_sq"]
        beta_1, beta_2 = group["betas"]
        square = gradient.square()
        first.lerp_(gradient, 1 - beta_1)
        second.addcmul_(square, (second - square).sign_(), value=beta_2 - 1)
        parameter.addcdiv_(first, second.sqrt().add_(group["eps"]), value=-group["lr"])
