"""The owner, the label and the official part of each sample of a map-style data set."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from pl_fed.data.batch_roles import BatchRoles, number_owners


def number_sample_owners(
    dataset: Any, owners: Any, roles: BatchRoles
) -> tuple[Tensor | None, list[str] | None]:
    """Return the ids of the owners of all samples, and their names.

    Args:
        dataset: The data set.
        owners: The owners that the samples hold, or ``None``.
        roles: The use of the entries of a sample.
    """
    client: Any = roles.client
    if client is None:
        return None, None
    if owners is None:
        owners = _owner_attribute(dataset, client) if isinstance(client, str) else client
    owners = _as_list(owners)
    if not isinstance(owners, Sequence) or len(owners) != len(dataset):
        got = f"{len(owners)} owners" if isinstance(owners, Sized) else repr(owners)
        raise ValueError(
            f"Expected argument `client` to give an owner for each of {len(dataset)} samples but"
            f" got {got}."
        )
    return number_owners(owners)


def _as_list(values: Any) -> Any:
    """Return the values of an array, or of a column of pandas, as a list; any other unchanged."""
    return list(values) if hasattr(values, "__array__") and isinstance(values, Iterable) else values


def read_labels(dataset: Any, labels: Callable[[Any], Any] | Sequence[Any]) -> Tensor:
    """Return the label of each sample for partitioners, int64 [samples].

    Args:
        dataset: The data set.
        labels: The labels of all samples, or a function that returns that of a sample.

    Raises:
        ValueError: If there is not one integer, or one text, for each sample.
    """
    if callable(labels):
        labels = [labels(dataset[position]) for position in range(len(dataset))]
    return number_labels(labels, len(dataset))


def number_labels(labels: Sequence[Any], samples: int) -> Tensor:
    """Return labels as integers, int64 [samples]; texts are numbered in alphabetical order.

    Raises:
        ValueError: If there is not one integer, or one text, for each sample.

    Example:
        >>> number_labels(["dog", "cat", "dog"], 3)
        tensor([1, 0, 1])
    """
    if not isinstance(labels, Tensor | np.ndarray):
        labels = _as_list(labels)
    if len(labels) and all(isinstance(label, str) for label in labels):
        labels = np.unique(labels, return_inverse=True)[1].tolist()
    got = f"{len(labels)} values such as {labels[0]!r}" if len(labels) else "no values"
    with suppress(TypeError, ValueError, RuntimeError):  # the sentence below
        values = torch.as_tensor(labels)
        got = f"{values.dtype} {list(values.shape)}"
        is_integer = not values.is_floating_point() and not values.is_complex()
        if values.shape == (samples,) and is_integer:
            return values.to(torch.int64)
    raise ValueError(
        f"Expected argument `labels` to give an integer, or a text, for each of {samples} samples"
        f" but got {got}."
    )


def list_parts(data_sets: Mapping[int, Any]) -> Tensor | None:
    """Return the official part of each sample; ``None`` for a single data set."""
    if len(data_sets) == 1:
        return None
    sizes = torch.tensor([len(piece) for piece in data_sets.values()])
    return torch.tensor(list(data_sets)).repeat_interleave(sizes)


def _owner_attribute(dataset: Any, name: str) -> list[Any]:
    """Return the owners of all samples from an attribute of a data set, also below a subset."""
    if hasattr(dataset, name):
        return [*getattr(dataset, name)]
    if isinstance(dataset, Subset):
        owners = _owner_attribute(dataset.dataset, name)
        return [owners[index] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        return [owner for piece in dataset.datasets for owner in _owner_attribute(piece, name)]
    raise ValueError(
        "Expected argument `client` to be the key of an entry of each sample, or an attribute of"
        f" {type(dataset).__name__} with the owner of each sample, but got {name!r}."
    )
