"""Normalization: inputs with mean 0 and standard deviation 1 over the training samples."""

from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Normalization:
    """Affine normalization of inputs: (x − mean) / std.

    Attributes:
        mean: The subtrahend, [1, ...]; broadcasts over a batch of inputs.
        std: The divisor, [1, ...]; broadcasts over a batch of inputs. It is the standard deviation,
            with 0.001 added in the mode ``"feature"``.

    Example:
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> Normalization.fit(x, "channel", torch.tensor([0, 1]))(x).flatten()
        tensor([-1.,  1.])
    """

    mean: Tensor
    std: Tensor

    @classmethod
    def fit(
        cls, x: Tensor, mode: Literal["none", "channel", "feature"] | list[Any], train: Tensor
    ) -> Self | None:
        """Compute the normalization of inputs; ``None`` in the mode ``"none"``.

        Args:
            x: Inputs, float [samples, ...].
            mode: ``"none"``, ``"channel"``, ``"feature"`` or a pair [mean, std]: the argument
                ``normalize`` of :class:`pl_fed.data.FederatedData`.
            train: Ids of the training samples, int64; the statistics are computed from them.

        Raises:
            ValueError: If a pair does not fit the inputs.
        """
        if isinstance(mode, str):
            if mode == "none":
                return None
            dims = [0] if mode == "feature" else [d for d in range(x.dim()) if d != 1]
            std, mean = torch.std_mean(x[train], dim=dims, correction=0, keepdim=True)
            return cls(mean, std + 0.001 if mode == "feature" else torch.where(std > 0, std, 1))
        if len(mode) != 2:
            raise ValueError(
                f"Expected argument `normalize` to be a pair [mean, std] but got {mode}."
            )
        mean, std = (torch.tensor(part, dtype=x.dtype).reshape(-1) for part in mode)
        channels = x.shape[1] if x.dim() > 1 else 1
        if {len(mean), len(std)} - {1, channels} or not _is_valid(mean, std):
            raise ValueError(
                "Expected argument `normalize` to hold one finite number per channel"
                f" ({channels}), and positive standard deviations, but got {mode}."
            )
        shape = (1, -1, *([1] * (x.dim() - 2))) if x.dim() > 1 else (-1,)
        return cls(mean.view(shape), std.view(shape))

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalized inputs [samples, ...]."""
        return (x - self.mean) / self.std


def _is_valid(mean: Tensor, std: Tensor) -> bool:
    return bool(mean.isfinite().all() and std.isfinite().all() and (std > 0).all())
