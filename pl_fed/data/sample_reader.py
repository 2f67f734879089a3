"""Samples of a data set, joined and separated into inputs, targets and labels."""

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from pl_fed.data.batch_roles import BatchRoles
from pl_fed.data.collation import PaddingCollation
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

    def __call__(self, samples: list[Any]) -> Samples:
        """Return some samples, joined.

        Raises:
            ValueError: If the collation does not return a row for each sample.
        """
        owners = [self.roles.owner(sample) for sample in samples]
        length = len(samples[0]) if isinstance(samples[0], Sized) else 0
        batch = self.collate(samples)
        inputs, targets, labels, entries = self.roles.separate(batch, length)
        joined = Samples(
            inputs, targets, labels, None if None in owners else owners, entries=entries
        )
        for leaf in joined.leaves:
            if leaf.shape[:1] != (len(samples),):
                raise ValueError(
                    f"Expected argument `collate_fn` to return tensors with a row for each of"
                    f" {len(samples)} samples but got shape {list(leaf.shape)}."
                )
        if not self.pads:
            return joined
        return replace(joined, empty_batch=tree_map(lambda leaf: leaf[:0], batch))

    @property
    def pads(self) -> bool:
        """Whether shorter samples are padded by ``padding``."""
        return isinstance(self.collate, PaddingCollation)

    def lengthen(self, batch: Any) -> "SampleReader":
        """Return a reader that pads at least to the lengths of a joined batch."""
        if not isinstance(self.collate, PaddingCollation):
            return self
        return replace(self, collate=self.collate.lengthen(batch))
