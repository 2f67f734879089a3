"""The results of ``predict_step`` for the batches of a client, joined to one for its samples."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_fed.trees import leaves


class PerSample(list[Any]):
    """Per sample: predictions as a list with an entry of any structure for each sample."""


def join_predictions(predictions: Sequence[Any], sizes: Sequence[int], are_own: bool) -> Any:
    """Return the predictions for several batches as those for all their samples.

    Arrays of NumPy become tensors. Numbers, texts and ``None`` that all batches share stay as they
    are.

    Args:
        predictions: The result of ``predict_step`` for each batch: tensors with a row for each
            sample, a list with an entry for each, or a dict, list or tuple of them.
        sizes: The number of samples in each batch.
        are_own: Whether the batches are the data set's own. Of these, a list as long as the batch
            always has an entry for each sample, such as a detector's; of others, it may have an
            entry for each output.

    Raises:
        ValueError: If a result is neither, or rows of two batches have other shapes.

    Example:
        >>> batches = [{"score": torch.ones(2), "name": ["a", "b"]}]
        >>> batches += [{"score": torch.zeros(1), "name": ["c"]}]
        >>> join_predictions(batches, [2, 1], are_own=False)
        {'score': tensor([1., 1., 0.]), 'name': ['a', 'b', 'c']}
    """
    first = predictions[0]
    if all(isinstance(value, np.ndarray) and value.dtype != object for value in predictions):
        predictions = [torch.as_tensor(value) for value in predictions]
    if all(_has_rows(value, size) for value, size in zip(predictions, sizes)):
        _check_equal_rows(predictions)
        return torch.cat([*predictions])
    if all(isinstance(value, dict) and value.keys() == first.keys() for value in predictions):
        columns = {name: [value[name] for value in predictions] for name in first}
        return {name: join_predictions(values, sizes, are_own) for name, values in columns.items()}
    if all(isinstance(value, list | tuple) for value in predictions):
        fit = all(len(value) == size for value, size in zip(predictions, sizes))
        if fit and (are_own or not _are_columns(predictions, sizes)):
            return PerSample(chain.from_iterable(predictions))
        if all(len(value) == len(first) for value in predictions):
            entries = [join_predictions(values, sizes, are_own) for values in zip(*predictions)]
            return type(first)(*entries) if hasattr(first, "_fields") else type(first)(entries)
    if isinstance(first, int | float | str | None) and all(v == first for v in predictions):
        return first
    raise ValueError(
        "Expected `predict_step` to return tensors with a row for each sample of its batch, or a"
        f" list with an entry for each, but got {_describe(first)}."
    )


def _check_equal_rows(tensors: Sequence[Tensor]) -> None:
    """Refuse tensors with rows of several shapes, as those of batches with their own padding."""
    shapes = [*dict.fromkeys(tensor.shape[1:] for tensor in tensors)]
    if len(shapes) > 1:
        raise ValueError(
            "Expected `predict_step` to return rows of one shape for all batches of a client but"
            f" got {list(shapes[0])} and {list(shapes[1])}: define one that returns a list with an"
            " entry for each sample, without padding."
        )


def _has_rows(value: Any, size: int) -> bool:
    """Return whether a value is a tensor with a row for each sample."""
    return isinstance(value, Tensor) and value.shape[:1] == (size,)


def _are_columns(predictions: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Return whether lists contain tensors, all with a row for each sample."""
    rows = [
        _has_rows(leaf, size) for value, size in zip(predictions, sizes) for leaf in leaves(value)
    ]
    return bool(rows) and all(rows)


def _describe(value: Any) -> str:
    """Return the type of a prediction, and the shape of a tensor."""
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
