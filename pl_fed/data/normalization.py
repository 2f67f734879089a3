"""Inputs with mean 0 and standard deviation 1, by the statistics of the training samples."""

from typing import Any, Literal

import torch
from torch import Tensor


def normalized(
    x: Tensor, how: Literal["none", "channel", "feature"] | list[Any], train: Tensor
) -> Tensor:
    """Return inputs with their mean subtracted, divided by their standard deviation.

    Args:
        x: Inputs, float [samples, ...].
        how: See :class:`FederatedData`.
        train: Ids of the samples from which the statistics are taken.

    Example:
        >>> normalized(torch.tensor([[1.0], [3.0]]), "channel", torch.tensor([0, 1])).flatten()
        tensor([-1.,  1.])
    """
    if isinstance(how, str):
        if how == "none":
            return x
        if how == "feature":
            std, mean = torch.std_mean(x[train], dim=0, correction=0)
            return (x - mean) / (std + 0.001)
        over = [d for d in range(x.dim()) if d != 1]
        std, mean = torch.std_mean(x[train], dim=over, correction=0, keepdim=True)
        return (x - mean) / torch.where(std > 0, std, 1)
    if len(how) != 2:
        raise ValueError(f"Expected argument `normalize` to be a pair [mean, std] but got {how}.")
    mean, std = (torch.tensor(part, dtype=x.dtype).reshape(-1) for part in how)
    channels = x.shape[1] if x.dim() > 1 else 1
    if {len(mean), len(std)} - {1, channels} or not bool((std > 0).all()):
        raise ValueError(
            f"Expected argument `normalize` to hold one positive number per channel ({channels})"
            f" but got {how}."
        )
    shape = (1, -1, *([1] * (x.dim() - 2))) if x.dim() > 1 else (-1,)
    return (x - mean.view(shape)) / std.view(shape)
