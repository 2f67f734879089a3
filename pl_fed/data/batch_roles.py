"""Batch roles: the inputs, targets and clients in the batches of a data set or dataloader."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_fed.data.sample_structure import to_entries
from pl_fed.trees import Tree, foreign_leaf
from pl_fed.types import SampleEntries

Owner = Callable[[Any], Any] | int | str | Sequence[Any] | None
_TARGET_KEYS = ("labels", "label", "targets", "target", "y")


class UnstackableError(ValueError):
    """Unstackable: joined samples are no tensors with a row for each sample alone."""


class MissingRowsError(UnstackableError):
    """Missing rows: tensors of joined samples have fewer rows than there are samples."""


@dataclass(frozen=True)
class BatchRoles:
    """Batch roles: the use of each entry of a sample or batch, by key or position.

    Attributes:
        client: The owner of each sample: the key or position of an entry, a function of a sample,
            the name of an attribute of the data set, or the owners of all samples.
        inputs: The entries of the inputs; ``None`` for all entries without another role. The
            owner may be one of them, for example the user of a recommender.
        labels: The entry of the class of each sample for partitioners; ``None`` uses the targets.
        target: The entry of the targets. ``None`` for the last entry of a tuple, or the entry of a
            dict with the key labels, label, targets, target or y.

    Example:
        >>> batch = {"ids": torch.ones(2, 3), "site": ["a", "b"], "label": torch.zeros(2)}
        >>> BatchRoles(client="site").separate(batch, 3)[:2]
        (tensor([[1., 1., 1.],
                [1., 1., 1.]]), tensor([0., 0.]))
    """

    client: Owner = None
    inputs: Sequence[str | int] | None = None
    target: str | int | None = None
    labels: str | int | None = None

    @property
    def owner_entry(self) -> int | str | None:
        """The key or position of the owner; ``None`` for a function, or the owners of all."""
        return self.client if isinstance(self.client, int | str) else None

    def owner(self, sample: Any) -> Any:
        """Return the owner of a sample, or ``None`` if samples do not hold their owners.

        Raises:
            ValueError: If the sample has no such entry, or the function fails.
        """
        if callable(self.client):
            return self.client(sample)
        sample = to_entries(sample)
        if isinstance(self.client, int):
            if isinstance(sample, tuple | list) and -len(sample) <= self.client < len(sample):
                return sample[self.client]
            raise ValueError(
                "Expected argument `client` to be a position in each sample but got"
                f" {self.client} for {_describe_entries(sample)}."
            )
        if isinstance(self.client, str) and isinstance(sample, Mapping) and self.client in sample:
            return sample[self.client]
        return None

    def separate(self, batch: Any, sample_length: int) -> tuple[Tree, Tree, Tree, SampleEntries]:
        """Return the inputs, the targets, the labels or ``None``, and the entries of a batch.

        Args:
            batch: The batch: a dict, a tuple or a list.
            sample_length: Number of entries of a sample. A batch of as many entries holds the
                owners at the same position.

        Raises:
            ValueError: If the batch has no such entries.
        """
        batch = to_entries(batch)
        roles = self._without_negative_positions(batch)
        names, target = roles._find_entries(batch, sample_length)
        labels = () if roles.labels is None else (roles.labels,)
        others = [name for name in names if name not in (target, *labels)]
        inputs = others if roles.inputs is None else roles.inputs
        if not inputs or any(name not in names for name in (*inputs, target, *labels)):
            is_named = self.inputs is not None or self.target is not None
            has_rows = isinstance(batch, Mapping | tuple | list) and (
                is_named or all(foreign_leaf(_convert(batch[name])) is None for name in names)
            )
            raise (ValueError if has_rows else UnstackableError)(
                "Expected each sample to have inputs and a target, as (x, y) or a dict, but got"
                f" {_describe_entries(batch)}: name them by `inputs` and `target`, which may be one"
                " entry, or return (x, x) from a data set without targets."
            )
        entries = {name: _to_tree(name, batch[name]) for name in (*inputs, target, *labels)}
        joined: Tree = tuple(entries[name] for name in inputs)
        if len(inputs) == 1:
            joined = entries[inputs[0]]
        elif isinstance(batch, Mapping):
            joined = {name: entries[name] for name in inputs}
        places = SampleEntries(tuple(inputs), target)
        return joined, entries[target], entries[labels[0]] if labels else None, places

    def _without_negative_positions(self, batch: Any) -> "BatchRoles":
        """Return roles whose positions in a tuple count from its first entry."""
        if not isinstance(batch, tuple | list):
            return self

        def count(name: Any) -> Any:
            is_negative = isinstance(name, int) and -len(batch) <= name < 0
            return name + len(batch) if is_negative else name

        inputs = None if self.inputs is None else [count(name) for name in self.inputs]
        return BatchRoles(self.client, inputs, count(self.target), count(self.labels))

    def _find_entries(self, batch: Any, sample_length: int) -> tuple[list[Any], Any]:
        """Return the names of the entries without the owner's, and the name of the target."""
        if isinstance(batch, Mapping):
            entry = self.owner_entry
            names: list[Any] = [n for n in batch if n != entry or n in (self.inputs or ())]
            return names, self.find_target([name for name in names if name != entry])
        if not isinstance(batch, tuple | list):
            return [], None
        names = [*range(len(batch))]
        owner = None
        if isinstance(self.client, int) and len(batch) == sample_length:
            owner = self.client % sample_length
            names = [n for n in names if n != owner or n in (self.inputs or ())]
        last = [name for name in names if name not in (self.labels, owner)][-1:]
        return names, self.target if self.target is not None or not last else last[0]

    def find_target(self, names: Sequence[Any]) -> Any:
        """Return the key of the target among the keys of a dict; ``None`` without a single one."""
        if self.target is not None:
            return self.target
        candidates = [name for name in _TARGET_KEYS if name in names and name != self.labels]
        return candidates[0] if len(candidates) == 1 else None


def number_owners(owners: Sequence[Any]) -> tuple[Tensor, list[str] | None]:
    """Return the id of each sample's owner, and the names of the ids unless owners are integers.

    Raises:
        ValueError: If an owner is neither an integer nor a text.

    Example:
        >>> number_owners([7, 3]), number_owners(["b", "a"])
        ((tensor([7, 3]), None), (tensor([1, 0]), ['a', 'b']))
    """
    values = [owner.item() if hasattr(owner, "item") else owner for owner in owners]
    for value in values:
        if not isinstance(value, int | str):
            raise ValueError(
                "Expected argument `client` to give an integer or a text for each sample but got"
                f" {value!r}."
            )
    if all(isinstance(value, int) for value in values):
        largest = max(values, key=abs, default=0)
        if abs(largest) >= 2**63:
            raise ValueError(
                "Expected argument `client` to give integers of less than 64 bits, or texts, but"
                f" got {largest}: give such ids as text."
            )
        return torch.tensor(values, dtype=torch.int64), None
    names, ids = np.unique([str(value) for value in values], return_inverse=True)
    return torch.from_numpy(ids).to(torch.int64), names.tolist()


def _to_tree(name: Any, value: Any) -> Tree:
    """Return an entry of a batch with arrays as tensors and mappings as dicts."""
    tree = _convert(value)
    kind = foreign_leaf(tree)
    if kind is not None:
        raise UnstackableError(
            f"Expected entry {name!r} of each sample to hold tensors, arrays or numbers but got"
            f" {kind}: leave it out by `inputs`, convert it by `collate_fn`, or set"
            " `data.dataset.batches: own`, so that the steps of a LightningModule get it unchanged."
        )
    return tree


def _convert(value: Any) -> Any:
    value = to_entries(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.as_tensor(value)
    if isinstance(value, Mapping):
        return {name: _convert(item) for name, item in value.items()}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return tuple(_convert(item) for item in value)
    return value


def _describe_entries(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a dict of {', '.join(map(str, batch)) or 'nothing'}"
    if isinstance(batch, tuple | list):
        return f"{len(batch)} entries"
    return type(batch).__name__
