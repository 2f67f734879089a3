"""Collation of samples of unequal lengths."""

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import repeat
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
        longest: A batch with the least lengths of the padded entries, or ``None``.

    Example:
        >>> PaddingCollation(-1)([torch.tensor([5]), torch.tensor([6, 7])])
        tensor([[ 5, -1],
                [ 6,  7]])
    """

    def __init__(self, padding: float | Mapping[str, float], longest: Any = None) -> None:
        values = padding.values() if isinstance(padding, Mapping) else [padding]
        for value in values:
            check_finite(padding=value)
        self.padding = padding
        self.longest = longest

    def lengthen(self, batch: Any) -> "PaddingCollation":
        """Return a collation that pads at least to the lengths of a batch.

        Example:
            >>> collate = PaddingCollation(-1).lengthen(torch.zeros(1, 3))
            >>> collate([torch.tensor([5])])
            tensor([[ 5, -1, -1]])
        """
        return PaddingCollation(self.padding, batch)

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch of some samples."""
        padding = None if isinstance(self.padding, Mapping) else self.padding
        return self._join(samples, padding, self.longest)

    def _join(self, values: Sequence[Any], padding: float | None, longest: Any) -> Any:
        first = values[0]
        if isinstance(first, Mapping):
            return {
                name: self._join(
                    [value[name] for value in values],
                    self._find(name, padding),
                    None if longest is None else longest[name],
                )
                for name in first
            }
        if isinstance(first, tuple):
            longest = [None] * len(first) if longest is None else longest
            branches = zip(*values, strict=True)
            return tuple(self._join(*pair) for pair in zip(branches, repeat(padding), longest))
        is_list = isinstance(first, list) and all(isinstance(n, int | float) for n in first)
        has_shape = hasattr(first, "shape") and not isinstance(first, str)  # numpy.str_ has one
        if padding is not None and (is_list or has_shape):
            return _pad(values, padding, longest)
        if is_list:
            return torch.stack([_to_tensor(value) for value in values])
        return default_collate([*values])

    def _find(self, name: str, padding: float | None) -> float | None:
        return self.padding.get(name) if isinstance(self.padding, Mapping) else padding


def _to_tensor(value: Any) -> Tensor:
    """Return a tensor; real numbers of Python keep their 64 bits, as in ``default_collate``."""
    is_real = isinstance(value, list) and any(isinstance(number, float) for number in value)
    return torch.as_tensor(value, dtype=torch.float64 if is_real else None)


def _pad(values: Sequence[Any], padding: float, longest_batch: Tensor | None) -> Tensor:
    """Return values as rows of one tensor, padded at the end of each dimension.

    Raises:
        ValueError: If a row needs the padding, and its type lacks this number.
    """
    tensors = [_to_tensor(value) for value in values]
    shapes = [tensor.shape for tensor in tensors]
    if longest_batch is not None:
        shapes.append(longest_batch.shape[1:])
    longest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    typed = [t for value, t in zip(values, tensors) if not isinstance(value, list) or value]
    if not typed:  # an empty list has no type
        typed = tensors if longest_batch is None else [longest_batch]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in typed))
    if any([*tensor.shape] != longest for tensor in tensors) and not _holds(dtype, padding):
        raise ValueError(
            f"Expected argument `padding` to be a number of type {dtype}, as the samples, but got"
            f" {padding}: change it, or the type of the samples"
        )
    rows = torch.full((len(tensors), *longest), padding, dtype=dtype)
    for row, tensor in zip(rows, tensors):
        row[tuple(map(slice, tensor.shape))] = tensor
    return rows


def _holds(dtype: torch.dtype, number: float) -> bool:
    """Return whether a type has a number, up to rounding of real numbers."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if dtype == torch.bool:
        return number in (0, 1)
    limits = torch.iinfo(dtype)
    return int(number) == number and limits.min <= number <= limits.max
