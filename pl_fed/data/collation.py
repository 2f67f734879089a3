"""Collation of samples of unequal lengths."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from pl_fed.arguments import check_finite


class PaddingCollation:
    """Padding collation: joins samples, padded at their ends to the longest sample.

    Args:
        padding: The number that pads, for all entries or by the key of an entry. Entries without a
            number must have equal lengths.

    Example:
        >>> PaddingCollation(-1)([torch.tensor([5]), torch.tensor([6, 7])])
        tensor([[ 5, -1],
                [ 6,  7]])
    """

    def __init__(self, padding: float | Mapping[str, float]) -> None:
        values = padding.values() if isinstance(padding, Mapping) else [padding]
        for value in values:
            check_finite(padding=value)
        self.padding = padding

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch of some samples."""
        return self._join(samples, None if isinstance(self.padding, Mapping) else self.padding)

    def _join(self, values: Sequence[Any], padding: float | None) -> Any:
        first = values[0]
        if isinstance(first, Mapping):
            return {
                name: self._join([value[name] for value in values], self._find(name, padding))
                for name in first
            }
        if isinstance(first, tuple):
            return tuple(self._join(branch, padding) for branch in zip(*values, strict=True))
        is_list = isinstance(first, list) and all(isinstance(n, int | float) for n in first)
        if padding is not None and (is_list or hasattr(first, "shape")):
            return _pad([torch.as_tensor(value) for value in values], padding)
        if is_list:
            return torch.stack([torch.as_tensor(value) for value in values])
        return default_collate([*values])

    def _find(self, name: str, padding: float | None) -> float | None:
        return self.padding.get(name) if isinstance(self.padding, Mapping) else padding


def _pad(tensors: Sequence[Tensor], padding: float) -> Tensor:
    """Return tensors as rows of one tensor, padded at the end of each dimension."""
    shapes = [tensor.shape for tensor in tensors]
    longest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    rows = tensors[0].new_full((len(tensors), *longest), padding)
    for row, tensor in zip(rows, tensors):
        row[tuple(map(slice, tensor.shape))] = tensor
    return rows
