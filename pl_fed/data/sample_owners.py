"""The owner, the label and the official part of each sample of a map-style data set."""

from collections.abc import Callable, Mapping, Sequence, Sized
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
    if not isinstance(owners, Sequence | Tensor | np.ndarray) or len(owners) != len(dataset):
        got = f"{len(owners)} owners" if isinstance(owners, Sized) else repr(owners)
        raise ValueError(
            f"Expected argument `client` to give an owner for each of {len(dataset)} samples but"
            f" got {got}."
        )
    return number_owners([*owners])


def read_labels(dataset: Any, labels: Callable[[Any], int] | Sequence[int]) -> Tensor:
    """Return the label of each sample for partitioners, int64 [samples].

    Args:
        dataset: The data set.
        labels: The labels of all samples, or a function that returns that of a sample.

    Raises:
        ValueError: If there is not one integer for each sample.
    """
    if callable(labels):
        labels = [labels(dataset[position]) for position in range(len(dataset))]
    values = torch.as_tensor(labels)
    if values.shape != (len(dataset),) or values.is_floating_point() or values.is_complex():
        raise ValueError(
            f"Expected argument `labels` to give an integer for each of {len(dataset)} samples but"
            f" got {values.dtype} {list(values.shape)}."
        )
    return values.to(torch.int64)


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
