"""Reading of a map-style data set into tensors."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, default_collate

from pl_fed.data.batch_roles import BatchRoles, number_owners
from pl_fed.data.source import Arrays, count_classes
from pl_fed.text import first_line
from pl_fed.trees import Tree, leaves, tree_map

Collate = Callable[[list[Any]], Any]
_CHUNK = 256  # samples that are collated at once
_READ_TWICE = 16  # samples that are read again, to find random draws


@dataclass(frozen=True)
class _Samples:
    inputs: Tree
    targets: Tree
    labels: Tree
    owners: Sequence[Any] | None


def read_data_sets(
    data_sets: Mapping[int, Any],
    roles: BatchRoles,
    collate_fn: Collate | None = None,
    num_classes: int | None = None,
    num_workers: int = 0,
) -> Arrays:
    """Return the samples of data sets, one data set after another.

    Args:
        data_sets: Map-style data sets by their official part. A single one has no official part.
        roles: The use of the entries of a sample.
        collate_fn: Joins samples into a batch; ``None`` for torch's ``default_collate``.
        num_classes: Number of classes; ``None`` uses the largest class id + 1.
        num_workers: Number of processes that read; 0 for this one.

    Raises:
        TypeError: If a data set is not map-style.
        ValueError: If a sample cannot be read, or samples do not fit together.
    """
    pieces = list(data_sets.values())
    for piece in pieces:
        _check_map_style(piece)
    dataset = pieces[0] if len(pieces) == 1 else ConcatDataset(pieces)
    reader = partial(_read_batch, roles=roles, collate=collate_fn or default_collate)
    name = " and ".join(dict.fromkeys(map(_name, pieces)))
    with _repeatable_draws(), _explain_errors(name):
        samples = _read_all(dataset, reader, num_workers)
        unstable = [_name(piece) for piece in pieces if _differs_when_read_again(piece, reader)]
    if unstable:
        rank_zero_warn(
            f"{unstable[0]} gives other samples when it is read again, and pl_fed reads each sample"
            " once, so its random augmentation is frozen: take it out of the data set, and set"
            " `data.augment`, which draws anew for each minibatch."
        )
    client, names = _number_owners(dataset, samples, roles)
    split = None
    if len(pieces) > 1:
        sizes = torch.tensor([len(piece) for piece in pieces])
        split = torch.tensor(list(data_sets)).repeat_interleave(sizes)
    classes = num_classes
    if classes is None:
        is_flat = isinstance(samples.targets, Tensor) and samples.targets.dim() == 1
        classes = count_classes(samples.targets) if is_flat else 0
    inputs, targets, labels = samples.inputs, samples.targets, samples.labels
    return Arrays(inputs, targets, client, split, classes, names, labels)


def _number_owners(
    dataset: Any, samples: _Samples, roles: BatchRoles
) -> tuple[Tensor | None, list[str] | None]:
    client: Any = roles.client
    owners: Any = samples.owners
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


def _read_all(dataset: Any, reader: Callable[..., _Samples], num_workers: int) -> _Samples:
    try:
        return _read_chunks(dataset, reader, _CHUNK, num_workers)
    except _UnequalShapesError:  # padded to the longest sample of a chunk
        return _read_chunks(dataset, reader, len(dataset), 0)


def _read_batch(samples: list[Any], roles: BatchRoles, collate: Collate) -> _Samples:
    """Return the inputs, targets and owners of some samples of a data set."""
    owners = [roles.owner(sample) for sample in samples]
    length = len(samples[0]) if isinstance(samples[0], Sized) else 0
    inputs, targets, labels = roles.separate(collate(samples), length)
    for leaf in leaves((inputs, targets, labels)):
        if leaf.shape[:1] != (len(samples),):
            raise ValueError(
                f"Expected argument `collate_fn` to return tensors with a row for each of"
                f" {len(samples)} samples but got shape {list(leaf.shape)}."
            )
    return _Samples(inputs, targets, labels, None if None in owners else owners)


def _read_chunks(
    dataset: Any, reader: Callable[[list[Any]], _Samples], size: int, num_workers: int
) -> _Samples:
    """Return all samples, read in chunks into tensors that are made once."""
    loader = DataLoader(
        dataset,
        size,
        collate_fn=reader,
        num_workers=num_workers,
        generator=torch.Generator().manual_seed(0),
    )
    store: _Samples | None = None
    owners: list[Any] | None = []
    done = 0
    for chunk in loader:
        if store is None:
            empty = partial(_allocate, len(dataset))
            inputs, targets = tree_map(empty, chunk.inputs), tree_map(empty, chunk.targets)
            store = _Samples(inputs, targets, tree_map(empty, chunk.labels), None)
        for rows, leaf in zip(_leaves_of(store), _leaves_of(chunk), strict=True):
            if rows.dtype != leaf.dtype:
                raise ValueError(
                    f"Expected all samples to be of one type but got {rows.dtype} and {leaf.dtype}."
                )
            if rows.shape[1:] != leaf.shape[1:]:
                raise _UnequalShapesError
            rows[done : done + len(leaf)] = leaf
        owners = None if owners is None or chunk.owners is None else [*owners, *chunk.owners]
        done += len(_leaves_of(chunk)[0])
    if store is None:
        raise ValueError("Expected at least one sample but got none.")
    return replace(store, owners=owners)


def _allocate(count: int, leaf: Tensor) -> Tensor:
    return leaf.new_empty((count, *leaf.shape[1:]))


def _leaves_of(samples: _Samples) -> list[Tensor]:
    return leaves((samples.inputs, samples.targets, samples.labels))


class _UnequalShapesError(Exception):
    """The samples of one chunk are padded to another length than those of another."""


def _differs_when_read_again(dataset: Any, reader: Callable[[list[Any]], _Samples]) -> bool:
    """Return whether some samples differ between two readings."""
    number = min(_READ_TWICE, len(dataset))
    index = [k * len(dataset) // number for k in range(number)]
    first, second = (_leaves_of(reader([dataset[k] for k in index])) for _ in range(2))
    return not all(torch.equal(leaf, other) for leaf, other in zip(first, second))


@contextmanager
def _repeatable_draws() -> Iterator[None]:
    """Make the draws of a data set from global generators the same in every run and process."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


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
        f" {_name(dataset)} with the owner of each sample, but got {name!r}."
    )


def _check_map_style(dataset: Any) -> None:
    is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not is_map:
        raise TypeError(
            "Expected argument `dataset` to be a map-style data set, with `__getitem__` and"
            f" `__len__`, but got {_name(dataset)}: read its samples into a list first."
        )


@contextmanager
def _explain_errors(name: str) -> Iterator[None]:
    """Replace any error of a user's data set or function by one sentence."""
    try:
        yield
    except Exception as error:  # of any type
        text = first_line(error)
        if text.startswith("Expected "):
            raise ValueError(f"{text} (in {name}).") from error
        if "equal size" in text:
            raise ValueError(
                f"Expected all samples of {name} to have the same shape but got several: set"
                " `padding` to the number that pads the shorter ones, or `collate_fn`."
            ) from error
        raise ValueError(
            f"Expected {name} to give samples that its `collate_fn` joins but got"
            f" {type(error).__name__}: {text}."
        ) from error


def _name(dataset: Any) -> str:
    return type(dataset).__name__
