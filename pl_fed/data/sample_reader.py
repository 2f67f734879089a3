"""Samples of a data set, joined and separated into inputs, targets and labels."""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import default_collate

from pl_fed.data.batch_roles import BatchRoles, MissingRowsError, UnstackableError
from pl_fed.data.collation import PaddingCollation
from pl_fed.data.sample_structure import align, to_entries
from pl_fed.trees import Tree, leaves, tree_map
from pl_fed.types import SampleEntries

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Samples:
    """Samples: some samples of a data set.

    Attributes:
        inputs: Inputs [samples, ...].
        targets: Targets [samples, ...].
        labels: Labels for partitioners [samples], or ``None``.
        owners: The owner of each sample, or ``None``.
        empty_batch: The joined samples without rows, which have the lengths of the padding.
        entries: The places of inputs and target in the joined samples, if known.
    """

    inputs: Tree
    targets: Tree
    labels: Tree
    owners: Sequence[Any] | None
    empty_batch: Any = None
    entries: SampleEntries | None = None

    @property
    def by_name(self) -> dict[str, Tree]:
        """The inputs by their keys or positions, the target and the labels."""
        if self.entries is None:
            return {"inputs": self.inputs, "target": self.targets, "labels": self.labels}
        names, inputs = self.entries.inputs, self.inputs
        trees = {str(names[0]): inputs}
        if len(names) > 1 and isinstance(inputs, dict):
            trees = {str(name): inputs[name] for name in names}
        elif len(names) > 1:
            trees = {str(name): tree for name, tree in zip(names, inputs)}
        target = str(self.entries.target)
        trees[f"{target} as target" if target in trees else target] = self.targets
        return trees if self.labels is None else {**trees, "labels for partitioners": self.labels}

    @property
    def leaves(self) -> list[Tensor]:
        """All tensors, in their order."""
        return leaves((self.inputs, self.targets, self.labels))


@dataclass(frozen=True)
class SampleReader:
    """Sample reader: joins samples into a batch, and separates it by the use of its entries.

    Attributes:
        roles: The use of the entries of a sample.
        collate: Joins samples into a batch.

    Example:
        >>> from torch.utils.data import default_collate
        >>> samples = SampleReader(BatchRoles(), default_collate)([(0.5, 1), (1.5, 0)])
        >>> samples.inputs.tolist(), samples.targets.tolist()
        ([0.5, 1.5], [1, 0])
    """

    roles: BatchRoles
    collate: Collate

    def __call__(self, samples: list[Any], first: int = 0) -> Samples:
        """Return some samples, joined.

        Args:
            samples: The samples.
            first: The position of the first one in the data set, for errors.

        Raises:
            ValueError: If samples have several structures, or the collation does not return a row
                for each sample.
        """
        kind = type(samples[0])
        samples = self._match_keys(samples, first)
        owners = [self.roles.owner(sample) for sample in samples]
        length = len(samples[0]) if isinstance(samples[0], Sized) else 0
        batch = self.collate(samples)
        kind = type(batch) if self._is_users else kind  # as in Lightning
        try:
            inputs, targets, labels, entries = self.roles.separate(batch, length)
        except ValueError as error:
            is_own = self._is_users and self.roles.inputs is None and self.roles.target is None
            if is_own and not _has_rows(batch, len(samples)):
                raise UnstackableError(str(error)) from error
            raise
        if hasattr(kind, "_fields") or is_dataclass(kind):
            entries = replace(entries, kind=kind)
        has_owners = callable(self.roles.client) or any(owner is not None for owner in owners)
        joined = Samples(inputs, targets, labels, owners if has_owners else None, entries=entries)
        _check_rows(joined.leaves, len(samples))
        if not self.pads:
            return joined
        return replace(joined, empty_batch=tree_map(lambda leaf: leaf[:0], batch))

    def _match_keys(self, samples: list[Any], first: int) -> list[Any]:
        """Return samples with the keys of the first one, in its order; dataclasses as dicts.

        A ``collate_fn`` of the user's own receives the samples as they are.
        """
        if self._is_users:
            return samples
        like = self._select_entries(samples[0])
        return [
            align(self._select_entries(sample), like, f"sample {first + number}")
            for number, sample in enumerate(samples)
        ]

    def _select_entries(self, sample: Any) -> Any:
        """Return the entries of a dict that have a use, if the inputs are named."""
        sample, roles = to_entries(sample), self.roles
        if roles.inputs is None or not isinstance(sample, Mapping) or callable(roles.client):
            return sample
        owner = roles.owner_entry
        used = {*roles.inputs, roles.find_target(list(sample)), roles.labels, owner}
        if not used - {None, owner} <= sample.keys():
            return sample
        return {name: value for name, value in sample.items() if name in used}

    @property
    def pads(self) -> bool:
        """Whether shorter samples are padded by ``padding``."""
        return isinstance(self.collate, PaddingCollation)

    @property
    def _is_users(self) -> bool:
        """Whether the collate function is the user's own."""
        return not self.pads and self.collate is not default_collate

    def lengthen(self, batch: Any) -> "SampleReader":
        """Return a reader that pads at least to the lengths of a joined batch."""
        if not isinstance(self.collate, PaddingCollation):
            return self
        return replace(self, collate=self.collate.lengthen(batch))


def _check_rows(tensors: Sequence[Tensor], samples: int) -> None:
    """Raise ``UnstackableError`` unless all tensors have a row for each sample.

    Samples are probably left out if all tensors have as many rows, and several. One row alone may
    hold all samples, as packed texts do.
    """
    rows = {len(tensor) if tensor.dim() else 0 for tensor in tensors}
    for tensor in tensors:
        if tensor.shape[:1] == (samples,):
            continue
        text = (
            "Expected argument `collate_fn` to return tensors with a row for each of"
            f" {samples} samples but got shape {list(tensor.shape)}"
        )
        if len(rows) == 1 and 1 < min(rows) < samples:
            raise MissingRowsError(
                f"{text}: if it leaves samples out, give a torch.utils.data.Subset of the others."
            )
        raise UnstackableError(f"{text}.")


def _has_rows(batch: Any, samples: int) -> bool:
    """Return whether a batch has a row for each sample in all its tensors, and no nested lists."""
    batch = to_entries(batch)
    if isinstance(batch, Tensor | np.ndarray):
        return batch.shape[:1] == (samples,)
    if isinstance(batch, Mapping):
        return all(_has_rows(part, samples) for part in batch.values())
    if isinstance(batch, tuple | list):
        is_nested = any(isinstance(part, Mapping | tuple | list) for part in batch)
        return not is_nested and all(_has_rows(part, samples) for part in batch)
    return True
