"""Data sources: a data set's samples as tensors, with their owners and official parts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pl_fed.configurable import Configurable
from pl_fed.data.memory_map import holds_memory_map, tensors_of_memory_maps
from pl_fed.tasks.own_batches import OwnBatches
from pl_fed.trees import Tree, count_samples, describe, foreign_leaf, leaves, tree_map
from pl_fed.types import SampleEntries

TRAIN, VAL, TEST = 0, 1, 2
_MOST_GROUPS = 1000
_BLOCK = 1 << 24  # numbers that are checked at once


@dataclass(frozen=True)
class Arrays:
    """Arrays: all samples of a data set as tensors.

    Inputs and targets may also be tuples or dicts of tensors, for example token ids and a mask. A
    net takes such inputs as ``net(*inputs)`` or ``net(**inputs)``.

    Attributes:
        inputs: Inputs [samples, ...]. Images are [samples, channels, height, width], and uint8 is
            scaled from 0..255 to [0, 1]. Other integers, such as token ids, stay integers if the
            net takes integers; otherwise they become float32.
        targets: Targets: class ids 0..C-1 of any integer type [samples], or real values
            [samples, ...].
        client: Id of the owner of each sample [samples], any integers; sorted, they become clients
            0, 1, 2, ... ``None`` if the data set records no owners, so that a partitioner is
            needed.
        split: Official part of each sample [samples], 0 train, 1 val, 2 test; ``None`` without
            official parts.
        num_classes: Number of classes; 0 if the targets are not class ids [samples].
        names: Names of the owners (writers, users); the ids in ``client`` are then positions in
            this list. ``None`` if the owners have no names.
        labels: Class of each sample, int [samples], for partitioners, where the targets are not
            class ids; ``None`` uses the targets.
        mapped: Whether inputs are memory maps (``numpy.load(path, mmap_mode="r")``), which become
            tensors that share their files. Each minibatch reads and converts its own rows.
        redraw: Reads samples anew for each training minibatch, because they are random. It takes
            the positions of samples and a key of the draws of each, and returns inputs and targets
            like those above, which serve validation and tests. ``None`` if samples do not change.
        entries: The places of inputs and target in the samples of a data set, for the steps of a
            LightningModule, or the data set's own batches; ``None`` if the samples have no other
            structure.
        class_names: Names of the classes 0..C-1, for tables of results; empty without names.
        groups: Group of each sample [samples], any integers from 0, such as an age band: gaps
            between groups are measured in evaluations. No algorithm and no net sees them. ``None``
            without groups.
        group_names: Names of the groups 0..G-1; without names they are numbers.
        ordered_draws: The source of random numbers in samples that depend on the order in which all
            samples are read, in words; empty without any. ``federation.privacy`` refuses them.

    Raises:
        TypeError: If inputs, targets, ``client`` or ``split`` are no tensors, or inputs are
            complex.
        ValueError: If there is no sample, a tensor does not have one row per sample, a number is
            NaN or infinite, an id is out of range, or a name is no text in UTF-8.

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
    labels: Tensor | None = None
    mapped: bool = False
    redraw: Callable[[list[int], list[int]], tuple[Tree, Tree]] | None = None
    entries: SampleEntries | OwnBatches | None = None
    class_names: Sequence[str] = ()
    groups: Tensor | None = None
    group_names: Sequence[str] = ()
    ordered_draws: str = ""

    def __post_init__(self) -> None:
        """Check that the tensors fit together."""
        self._open_memory_maps()
        self._check_tensors()
        self._remove_graphs()
        first = leaves(self.inputs)[0]
        if first.dim() == 0 or len(first) == 0:
            raise ValueError(
                f"Expected `inputs` to hold at least one sample but got shape {list(first.shape)}."
            )
        for name in ("inputs", "targets", "client", "split", "labels", "groups"):
            for leaf in leaves(getattr(self, name)):
                if leaf.shape[:1] != (len(self),):
                    raise ValueError(
                        f"Expected `{name}` to have {len(self)} rows, as many as `inputs`, but got"
                        f" shape {list(leaf.shape)}."
                    )
        for name in ("targets", "client", "split", "labels", "groups"):
            tensor = getattr(self, name)
            if isinstance(tensor, Tensor):
                object.__setattr__(self, name, _to_int64(name, tensor))
        for leaf in leaves(self.inputs):
            _check_finite("inputs", leaf, torch.float32)
            _to_int64("inputs", leaf[:0] if leaf.dtype != torch.uint64 else leaf)  # the check alone
        for leaf in leaves(self.targets):
            _check_finite("targets", leaf)
        if self.names is None:
            _check_ids("client", self.client)
        else:
            _check_names(self.names)
            _check_ids("client", self.client, range(len(self.names)), "positions in `names`")
        _check_ids("split", self.split, range(3), "0 (train), 1 (val) or 2 (test)")
        _check_ids("labels", self.labels, range(2**31), "class ids from 0")
        _check_names(self.group_names, "groups")
        num_groups = len(self.group_names) or _MOST_GROUPS
        _check_ids("groups", self.groups, range(num_groups), f"ids from 0 to below {num_groups}")
        self._check_targets()
        self._check_class_names()

    def _check_class_names(self) -> None:
        _check_names(self.class_names, "classes")
        if self.class_names and len(self.class_names) != self.num_classes:
            raise ValueError(
                f"Expected `class_names` to name {self.num_classes} classes but got"
                f" {len(self.class_names)} names."
            )

    def _open_memory_maps(self) -> None:
        if holds_memory_map(self.inputs):
            object.__setattr__(self, "inputs", tensors_of_memory_maps(self.inputs))
            object.__setattr__(self, "mapped", True)

    def _remove_graphs(self) -> None:
        """Detach tensors that a net computed with gradients: samples are constants."""
        for name in ("inputs", "targets"):
            object.__setattr__(self, name, tree_map(Tensor.detach, getattr(self, name)))

    def _check_tensors(self) -> None:
        for name in ("client", "split", "labels", "groups"):
            tensor = getattr(self, name)
            if tensor is not None and not isinstance(tensor, Tensor):
                raise TypeError(_expect_tensor(name, type(tensor).__name__))
        if self.split is not None and self.split.dtype == torch.bool:
            raise ValueError(
                "Expected `split` to be 0 (train), 1 (val) or 2 (test) but got booleans: write, for"
                " example, `2 * is_test` for a mask of test samples."
            )
        for name in ("inputs", "targets"):
            kind = foreign_leaf(getattr(self, name))
            if kind is not None:
                raise TypeError(_expect_tensor(name, kind))
        for leaf in leaves(self.inputs):
            if leaf.is_complex():
                raise TypeError(
                    f"Expected `inputs` to be real numbers or integers but got {leaf.dtype}, whose"
                    " imaginary part would be lost: convert them by torch.view_as_real."
                )

    def _check_targets(self) -> None:
        if not isinstance(self.targets, Tensor) or self.targets.is_floating_point():
            if self.num_classes:
                raise ValueError(
                    "Expected `num_classes` to be left out for targets that are real values"
                    f" ({describe(self.targets)}) but got {self.num_classes}."
                )
            return
        if self.targets.dim() > 1 and not self.num_classes:
            return  # several ids a sample: only the task knows their meaning
        _check_ids(
            "targets",
            self.targets,
            hint=": use floating point for several labels a sample, or leave `num_classes` at 0 if"
            " your own task takes such targets, for example a class for each pixel",
        )
        if not self.num_classes and int(self.targets.min()) >= 0:
            raise ValueError(
                "Expected `num_classes` to be the largest class id plus 1 for integer targets but"
                f" got 0: set it, or convert real values from {self.targets.dtype} to floating"
                " point."
            )
        description = f"class ids from 0 to below `num_classes` ({self.num_classes})"
        hint = ": leave out samples without a class" if int(self.targets.min()) < 0 else ""
        _check_ids("targets", self.targets, range(self.num_classes), description, hint)

    def __len__(self) -> int:
        return count_samples(self.inputs)

    @property
    def partition_labels(self) -> Tensor:
        """The labels, or else the targets, for partitioners; zeros without a label per sample."""
        targets = self.targets
        if self.labels is not None:
            return self.labels
        if isinstance(targets, Tensor) and (targets.is_floating_point() or targets.dim() == 1):
            return targets
        return torch.zeros(len(self))

    def list_group_names(self) -> tuple[str, ...]:
        """Return the names of the groups; their numbers without names, and none without groups."""
        if self.groups is None or self.group_names:
            return tuple(map(str, self.group_names))
        return tuple(map(str, range(int(self.groups.max()) + 1)))

    def owner_name(self, id: int) -> str:
        """Return the name of the owner with an id in ``client``."""
        return str(id if self.names is None else self.names[id])


class DataSource(Configurable, ABC):
    """Data source: a data set that loads completely, as tensors.

    To add one, write a subclass with :meth:`load`, and set ``data.dataset`` to its dotted path.
    """

    preparation: str = ""
    """Changes of the raw inputs by :meth:`load`, in words; inputs of a trained model need them."""

    minibatches: tuple[int, bool] | None = None
    """The batch size of the data's own dataloader, and whether it drops the last, smaller one.

    :meth:`load` may set it; ``None`` without a dataloader."""

    columns: Mapping[str, Sequence[str]] | None = None
    """The columns of the inputs of a table in their order, and the values of those of ids.

    :meth:`load` may set it; ``None`` for other inputs."""

    evaluation_sizes: Mapping[str, int] | None = None
    """The batch sizes of the data's own dataloaders of the parts ``val`` and ``test``.

    :meth:`load` may set it; ``None`` without such dataloaders."""

    @abstractmethod
    def load(self) -> Arrays:
        """Return the samples.

        Raises:
            FileNotFoundError: If data are missing; the message explains how to get them.
            ValueError: If data are broken.
        """

    def list_shared_quantities(self) -> dict[str, str]:
        """Return what :meth:`load` computes over the samples of all clients, by argument.

        Such numbers depend on each client's data, so that ``federation.privacy`` refuses them. The
        key is the argument that gives a public constant instead. A source that numbers categories,
        fills in missing values or scales by all samples lists this here.
        """
        return {}


def count_classes(y: Tensor) -> int:
    """Return the largest id + 1 of integer targets, or 0 for real values.

    Example:
        >>> import torch
        >>> count_classes(torch.tensor([0, 2, 1])), count_classes(torch.tensor([0.5]))
        (3, 0)
    """
    return 0 if y.is_floating_point() or len(y) == 0 else max(0, int(y.to(torch.int64).max()) + 1)


def _expect_tensor(name: str, kind: str) -> str:
    return f"Expected `{name}` to be a tensor but got {kind}: convert an array by torch.as_tensor."


def _to_int64(name: str, values: Tensor) -> Tensor:
    """Convert integers to int64, because torch lacks functions of other types; keep the rest."""
    if values.is_floating_point() or values.is_complex():
        return values
    integers = values.to(torch.int64)
    if values.dtype == torch.uint64 and bool((integers < 0).any()):
        raise ValueError(f"Expected `{name}` to be integers below 2^63 but got larger integers.")
    return integers


def _check_finite(name: str, values: Tensor, dtype: torch.dtype | None = None) -> None:
    """Raise ``ValueError`` for NaN or infinity in real numbers, also after a conversion.

    It reads blocks of 16 million numbers, so that a memory map needs little memory.
    """
    if not values.is_floating_point():
        return
    samples: list[int] = []
    block = max(1, _BLOCK // max(1, values[:1].numel()))
    for begin in range(0, len(values), block):
        finite = values[begin : begin + block].to(dtype or values.dtype).isfinite()
        if not bool(finite.all()):
            broken = ~finite.reshape(len(finite), -1).all(1)
            samples += (broken.nonzero().flatten() + begin).tolist()
    if samples:
        remedy = (
            ": write missing targets as a number that your loss leaves out, such as -1"
            if name == "targets"
            else ""
        )
        raise ValueError(
            f"Expected `{name}` to hold finite numbers but got NaN or infinity in {len(samples)}"
            f" samples, first in sample {samples[0]}{remedy}."
        )


def _check_names(names: Sequence[str], owners: str = "clients") -> None:
    """Raise ``ValueError`` for names that UTF-8 files cannot hold."""
    for position, name in enumerate(names):
        try:
            str(name).encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"Expected the names of {owners} to be text in UTF-8 but got {str(name)!r} at"
                f" position {position}: rename it."
            ) from None


def _check_ids(
    name: str,
    ids: Tensor | None,
    allowed: range | None = None,
    description: str = "",
    hint: str = "",
) -> None:
    if ids is None:
        return
    if ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"Expected `{name}` to be integers but got {ids.dtype}.")
    if ids.dim() != 1:
        raise ValueError(
            f"Expected the integers of `{name}` to be of shape [samples] but got"
            f" {list(ids.shape)}{hint}."
        )
    if allowed is None:
        return
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest not in allowed or largest not in allowed:
        wrong = smallest if smallest not in allowed else largest
        raise ValueError(f"Expected `{name}` to be {description} but got {wrong}{hint}.")
