"""Estimates of a Hessian from changes of a point and of its gradient.

R. H. Byrd, J. Nocedal and R. B. Schnabel, "Representations of quasi-Newton matrices and their use
in limited memory methods", Mathematical Programming 63, 1994, equation 3.22. With the columns s_i
of S and y_i of Y, the newest last::

    A = Sᵀ Y,    L = strictly lower part of A,    D = diag(A),    σ = y_mᵀ s_m / s_mᵀ s_m
    B v = σ v − [σ S, Y] [[σ Sᵀ S, L], [Lᵀ, −D]]⁻¹ [σ Sᵀ v; Yᵀ v]
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_LARGEST_CONDITION = 1e12  # of the scaled matrix of the small system


@dataclass(frozen=True)
class HessianEstimate:
    """Hessian estimate of L-BFGS in compact form; it maps the newest change to its difference.

    Attributes:
        scale: σ.
        basis: The rows σ s_i and y_i, float64 [2 m, d].
        inverse: The inverse of the small matrix, float64 [2 m, 2 m].

    Example:
        >>> changes = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, -0.5]])
        >>> estimate = HessianEstimate.fit(changes, changes * torch.tensor([1.0, 2.0, 4.0]))
        >>> estimate.multiply(torch.tensor([0.2, 0.4, 0.0]))
        tensor([0.2017, 0.8145, 0.0290], dtype=torch.float64)
    """

    scale: Tensor
    basis: Tensor
    inverse: Tensor

    @classmethod
    def fit(cls, changes: Tensor, differences: Tensor) -> "HessianEstimate | None":
        """Return the estimate of some pairs, or ``None`` if the small matrix is singular.

        Args:
            changes: The changes s_i of the point, oldest first, [m, d].
            differences: The differences y_i of the gradient, [m, d].
        """
        nonzero = (changes != 0).any(1)
        changes, differences = changes[nonzero].double(), differences[nonzero].double()
        if not len(changes):
            return None
        products, mixed = changes @ changes.T, changes @ differences.T
        scale = mixed[-1, -1] / products[-1, -1]
        lower = mixed.tril(-1)
        upper_half = torch.cat([scale * products, lower], 1)
        lower_half = torch.cat([lower.T, -mixed.diag().diag()], 1)
        matrix = torch.cat([upper_half, lower_half])
        sizes = matrix.abs().amax(1).sqrt()
        scaled = matrix / sizes[:, None] / sizes
        if not (scaled.isfinite().all() and torch.linalg.cond(scaled) < _LARGEST_CONDITION):
            return None
        inverse = torch.linalg.inv(scaled) / sizes[:, None] / sizes
        return cls(scale, torch.cat([scale * changes, differences]), inverse)

    def multiply(self, vector: Tensor) -> Tensor:
        """Return the product of the estimate with a vector [d], in float64 [d]."""
        wide = vector.double()
        return self.scale * wide - self.basis.T @ (self.inverse @ (self.basis @ wide))
