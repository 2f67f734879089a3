"""What a data set gives to a federation: arrays, and whose they are."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pl_fed.configurable import Configurable
from pl_fed.trees import Tree, describe, foreign_leaf, leaves, rows_of

TRAIN, VAL, TEST = 0, 1, 2


@dataclass(frozen=True)
class Arrays:
    """All samples of a data set as tensors.

    Inputs and targets may also be a tuple or a dict of tensors, as of token ids and a mask: a net
    takes them as ``net(*inputs)`` or ``net(**inputs)``.

    Attributes:
        inputs: Inputs [samples, ...]. Images are [samples, channels, height, width]; uint8 is read
            as 0..255 and scaled to [0, 1]; other integers stay integers if the net takes
            them, as token ids, and are float32 otherwise, as real numbers.
        targets: Targets [samples]: class ids 0..C-1 (any integer type) or real values
            [samples, ...].
        client: Id of the client each sample belongs to, [samples], or ``None`` where a partitioner
            has yet to say. Any integers: sorted, they become clients 0, 1, 2, ...
        split: The official part of each sample, [samples], 0 train, 1 val, 2 test; or ``None``.
        num_classes: Number of classes; 0 where the targets are no class ids [samples].
        names: What the data call the ids in ``client`` (writers, users), which are places in this
            list then; ``None`` where they have no other name.

    Raises:
        TypeError: If one is no tensor.
        ValueError: If there is no sample, the tensors do not have a row each for every sample, a
            number is NaN or infinite, an id is out of range, or a name is no text in UTF-8.

    Example:
        >>> import torch
        >>> len(Arrays(torch.zeros(3, 2), torch.tensor([0, 1, 1]), num_classes=2))
        3
    """

    inputs: Tree
    targets: Tree
    client: Tensor | None = None
    split: Tensor | None = None
    num_classes: int = 0
    names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Check that the tensors fit together."""
        self._check_tensors()
        first = leaves(self.inputs)[0]
        if first.dim() == 0 or len(first) == 0:
            raise ValueError(
                f"Expected `inputs` to hold at least one sample but got shape {list(first.shape)}."
            )
        for name in ("inputs", "targets", "client", "split"):
            for leaf in leaves(getattr(self, name)):
                if leaf.shape[:1] != (len(self),):
                    raise ValueError(
                        f"Expected `{name}` to have {len(self)} rows, as many as `inputs`, but got"
                        f" shape {list(leaf.shape)}."
                    )
        for name in ("targets", "client", "split"):
            tensor = getattr(self, name)
            if isinstance(tensor, Tensor):
                object.__setattr__(self, name, _wide(name, tensor))
        for leaf in leaves(self.inputs):
            _check_finite("inputs", leaf.to(torch.float32) if leaf.is_floating_point() else leaf)
        for leaf in leaves(self.targets):
            _check_finite("targets", leaf)
        if self.names is None:
            _check_ids("client", self.client)
        else:
            _check_names(self.names)
            _check_ids("client", self.client, range(len(self.names)), "places in `names`")
        _check_ids("split", self.split, range(3), "0 (train), 1 (val) or 2 (test)")
        self._check_targets()

    def _check_tensors(self) -> None:
        for name in ("client", "split"):
            tensor = getattr(self, name)
            if tensor is not None and not isinstance(tensor, Tensor):
                raise TypeError(_no_tensor(name, type(tensor).__name__))
        for name in ("inputs", "targets"):
            kind = foreign_leaf(getattr(self, name))
            if kind is not None:
                raise TypeError(_no_tensor(name, kind))

    def _check_targets(self) -> None:
        if not isinstance(self.targets, Tensor) or self.targets.is_floating_point():
            if self.num_classes:
                raise ValueError(
                    "Expected `num_classes` to be left out for targets that are real values"
                    f" ({describe(self.targets)}) but got {self.num_classes}."
                )
            return
        if self.targets.dim() > 1 and not self.num_classes:
            return  # several ids a sample: the task knows what they are
        _check_ids(
            "targets",
            self.targets,
            hint=": several labels a sample would be floating point, and for targets that a task of"
            " your own takes, as a class for each pixel, `num_classes` is 0",
        )
        if not self.num_classes and int(self.targets.min()) >= 0:
            raise ValueError(
                "Expected `num_classes` to be given for targets that are class ids, the largest id"
                " plus 1, but got 0: real values would be floating point, not"
                f" {self.targets.dtype}."
            )
        below = f"class ids from 0 to below `num_classes` ({self.num_classes})"
        _check_ids("targets", self.targets, range(self.num_classes), below)

    def __len__(self) -> int:
        return rows_of(self.inputs)

    @property
    def labels(self) -> Tensor:
        """The targets as partitioners take them: zeros where a sample has no single label."""
        targets = self.targets
        if isinstance(targets, Tensor) and (targets.is_floating_point() or targets.dim() == 1):
            return targets
        return torch.zeros(len(self))

    def owner_name(self, id: int) -> str:
        """Return what the data call an id in ``client``."""
        return str(id if self.names is None else self.names[id])


class DataSource(Configurable, ABC):
    """A data set that can be loaded whole, as tensors.

    A new one is a class with :meth:`load` in a file of its own, named in the config by its path.
    """

    preparation: str = ""
    """What :meth:`load` does to raw inputs, in words: those of a trained model need the same."""

    @abstractmethod
    def load(self) -> Arrays:
        """Return the samples.

        Raises:
            FileNotFoundError: If the data is not there, with a sentence that says how to get it.
            ValueError: If the data is broken.
        """


def count_classes(y: Tensor) -> int:
    """Return the number of classes of integer targets, the largest id + 1; 0 for real values.

    Example:
        >>> import torch
        >>> count_classes(torch.tensor([0, 2, 1])), count_classes(torch.tensor([0.5]))
        (3, 0)
    """
    return 0 if y.is_floating_point() or len(y) == 0 else max(0, int(y.to(torch.int64).max()) + 1)


def _no_tensor(name: str, kind: str) -> str:
    return (
        f"Expected `{name}` to be a tensor, as torch.as_tensor makes of an array, but got {kind}."
    )


def _wide(name: str, values: Tensor) -> Tensor:
    """Return integers as int64, as torch lacks functions of others; other values as they are."""
    if values.is_floating_point() or values.is_complex():
        return values
    wide = values.to(torch.int64)
    if values.dtype == torch.uint64 and bool((wide < 0).any()):
        raise ValueError(f"Expected `{name}` to be integers below 2^63 but got larger ones.")
    return wide


def _check_finite(name: str, values: Tensor) -> None:
    if values.is_floating_point() and not bool(values.isfinite().all()):
        broken = (~values.isfinite()).flatten(1 if values.dim() > 1 else 0)
        samples = (broken.any(1) if broken.dim() > 1 else broken).nonzero().flatten()
        raise ValueError(
            f"Expected `{name}` to hold finite numbers but got NaN or infinity in {len(samples)}"
            f" samples, first in sample {int(samples[0])}."
        )


def _check_names(names: Sequence[str]) -> None:
    """Refuse names that no file of the run could hold."""
    for place, name in enumerate(names):
        try:
            str(name).encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"Expected the names of clients to be text in UTF-8 but got {str(name)!r}, at place"
                f" {place}: rename this client."
            ) from None


def _check_ids(
    name: str,
    ids: Tensor | None,
    allowed: range | None = None,
    as_text: str = "",
    hint: str = "",
) -> None:
    if ids is None:
        return
    if ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"Expected `{name}` to be integers but got {ids.dtype}.")
    if ids.dim() != 1:
        raise ValueError(
            f"Expected `{name}`, being integers, to be of shape [samples] but got"
            f" {list(ids.shape)}{hint}."
        )
    if allowed is None:
        return
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest not in allowed or largest not in allowed:
        found = smallest if smallest not in allowed else largest
        raise ValueError(f"Expected `{name}` to be {as_text} but got {found}.")
