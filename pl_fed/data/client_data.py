"""The data of all clients: shared tensors of samples, and each client's indices into them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from pl_fed.data.fingerprint import digest_of, digest_of_labels, digest_of_names
from pl_fed.devices import to_device
from pl_fed.random import key, random_bits
from pl_fed.tasks.own_batches import OwnBatches
from pl_fed.trees import Tree, count_samples, describe, gather, leaves, select, tree_map
from pl_fed.types import Batch, SampleEntries

PartName = Literal["train", "val", "test"]
"""The names of the parts of the clients' data."""


@dataclass(frozen=True)
class Part:
    """One part (train, val or test) of every client.

    Attributes:
        index: Ids of the samples, client after client, int64 [samples of the part].
        offsets: Where each client's samples begin in ``index``, int64 [clients + 1], on the CPU.
    """

    index: Tensor
    offsets: Tensor

    @classmethod
    def from_pieces(cls, pieces: list[Tensor]) -> "Part":
        """Return a part of one index tensor per client."""
        return cls.from_sizes(torch.cat(pieces), torch.tensor([len(piece) for piece in pieces]))

    @classmethod
    def from_sizes(cls, index: Tensor, sizes: Tensor) -> "Part":
        """Return a part of sample ids, client after client, and the number of each client's."""
        return cls(index, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))

    def to(self, device: torch.device) -> "Part":
        """Return the part with its ids of samples on a device."""
        return Part(self.index.to(device), self.offsets)

    @cached_property
    def sizes(self) -> Tensor:
        """Number of samples of each client, int64 [clients], on the CPU."""
        return self.offsets.diff()

    @cached_property
    def largest(self) -> int:
        """Number of samples of the largest client."""
        return int(self.sizes.max()) if len(self.offsets) > 1 else 0

    def samples(self, client: int) -> Tensor:
        """Return the ids of one client's samples."""
        return self.index[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def owners(self) -> Tensor:
        """Return the client of each entry of ``index``, int64 [samples of the part]."""
        return torch.arange(len(self.sizes)).repeat_interleave(self.sizes)

    def select(self, clients: Tensor) -> "Part":
        """Return the part of some clients, by their ids, int64 [n] in ascending order."""
        is_selected = torch.zeros(len(self.sizes), dtype=torch.bool)
        is_selected[clients] = True
        selected = is_selected[self.owners()].to(self.index.device)
        return Part.from_sizes(self.index[selected], self.sizes[clients])

    def split(self, sizes: Sequence[Tensor]) -> "list[Part]":
        """Cut each client's samples into consecutive pieces.

        Args:
            sizes: For each piece, its number of samples of each client, int64 [clients]. The sizes
                of all pieces sum to the client's number of samples.
        """
        owners = self.owners()
        positions = torch.arange(len(self.index)) - self.offsets[owners]
        pieces, begin = [], torch.zeros_like(self.sizes)
        for size in sizes:
            end = begin + size
            inside = (positions >= begin[owners]) & (positions < end[owners])
            pieces.append(Part.from_sizes(self.index[inside], size))
            begin = end
        return pieces


@dataclass(frozen=True)
class ClientData:
    """Client data: the samples of all clients, gathered by index and not copied per client.

    Attributes:
        inputs: Inputs: a tensor [samples, ...], or a tuple or dict of such tensors.
        targets: Targets: a tensor [samples, ...], or a tuple or dict of such tensors.
        train: Training samples of the clients.
        val: Validation samples of the clients.
        test: Test samples of the clients.
        num_classes: Number of classes if targets are class ids [samples]; else 0.
        root: Ids of the server's own training samples, int64 [root samples].
        owners: Names of the owners of each client's samples, one or more per client; empty after a
            split by labels.
        ids: Position of each sample in the data set, int64 [samples], on the CPU. ``None`` if
            samples are in the data set's order, without copies.
        dtype: Floating-point type of gathered images: see :meth:`batch`.
        mapped: Whether inputs are memory maps. They stay on the CPU in their own type, and gathered
            rows are moved and converted.
        keeps_integers: Whether integers in gathered rows of memory maps stay integers.
        fingerprint: Fingerprint of the data set's inputs by :func:`fingerprint_of`, if known.
        redraw: Reads samples anew for each training minibatch: the argument of
            :class:`~pl_fed.data.Arrays`. ``None`` if samples do not change.
        entries: The places of inputs and target in the samples of a data set, if known; or its
            own batches, whose rows are the inputs.
        official: The parts that the data set itself gives; others are cut from train.
        class_names: Names of the classes; empty without names.
        groups: Group of each sample, int64 [samples], for the figures of evaluations; ``None``
            without groups.
        group_names: Names of the groups; empty without groups.
        scales_images: Whether the data set has uint8 inputs, and pl_fed scales them to [0, 1].
        keeps_parts: Whether later samples of an owner leave its earlier ones in their parts: they
            are cut by ``data.stable_cut``, or all parts are official.
        evaluation_sizes: The batch size of a part's evaluation by the steps of a LightningModule,
            if the data set gives one.
        ordered_draws: The argument of :class:`~pl_fed.data.Arrays`.
    """

    inputs: Tree
    targets: Tree
    train: Part
    val: Part
    test: Part
    num_classes: int
    root: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    owners: Sequence[Sequence[str]] = ()
    ids: Tensor | None = None
    fingerprint: dict[str, Any] | None = None
    dtype: torch.dtype = torch.float32
    mapped: bool = False
    keeps_integers: bool = True
    redraw: Callable[[list[int], list[int]], tuple[Tree, Tree]] | None = None
    entries: SampleEntries | OwnBatches | None = None
    official: tuple[str, ...] = ()
    class_names: Sequence[str] = ()
    keeps_parts: bool = False
    groups: Tensor | None = None
    group_names: Sequence[str] = ()
    scales_images: bool = False
    evaluation_sizes: Mapping[str, int] = field(default_factory=dict)
    ordered_draws: str = ""

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.train.offsets) - 1

    @property
    def own_batches(self) -> OwnBatches | None:
        """The data set's own batches; ``None`` if samples are tensors."""
        return self.entries if isinstance(self.entries, OwnBatches) else None

    @cached_property
    def kinds(self) -> tuple[str, str]:
        """The shapes and dtypes of a sample's inputs and targets, as text."""
        return str(describe(self.inputs)), str(describe(self.targets))

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digests of the data split (``samples``), the ``labels`` and the ``owners``.

        The digest of the split uses positions in the data set, so copies of samples do not change
        it.
        """
        parts = (self.train, self.val, self.test)
        index = torch.cat([*(part.index for part in parts), self.root])
        samples = index if self.ids is None else self.ids[index]
        return {
            "samples": digest_of(samples, *(part.offsets for part in parts)),
            "labels": digest_of_labels(self.targets, index),
            "owners": digest_of_names(self.owners),
        }

    @cached_property
    def client_digests(self) -> Tensor:
        """A digest of each client's samples and of their parts, int64 [clients].

        With owners, a sample is its place among the client's samples, so that samples of others do
        not matter. Without owners, it is its position in the data set.
        """
        parts = (self.train, self.val, self.test)
        owners = torch.cat([part.owners() for part in parts])
        index = torch.cat([part.index.cpu() for part in parts])
        samples = index if self.ids is None else self.ids[index]
        kinds = torch.arange(len(parts)).repeat_interleave(
            torch.tensor([len(part.index) for part in parts])
        )
        if self.owners:
            order = samples.argsort(stable=True)
            order = order[owners[order].argsort(stable=True)]
            sizes = owners.bincount(minlength=self.num_clients)
            places = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[owners[order]]
            samples = torch.empty_like(samples)
            samples[order] = places
        bits = random_bits(key(0, "samples of clients"), len(parts) * samples + kinds)
        return torch.zeros(self.num_clients, dtype=torch.int64).index_add_(0, owners, bits)

    def part(self, name: str) -> Part:
        """Return the part called ``train``, ``val`` or ``test``."""
        part: Part = getattr(self, name)
        return part

    def find_clients(self, samples: Tensor) -> list[int]:
        """Return the clients that have at least one of these samples, int64 [n], in any part."""
        parts = (self.train, self.val, self.test)
        owners = [p.owners()[torch.isin(p.index, samples.to(p.index.device)).cpu()] for p in parts]
        return sorted(set(torch.cat(owners).tolist()))

    def select(self, clients: Tensor) -> "ClientData":
        """Return the data of some clients, by their ids, int64 [n] in ascending order.

        They become the clients 0, 1, ...; the samples are shared and not copied. The server keeps
        its samples.
        """
        owners = [self.owners[client] for client in clients.tolist()] if self.owners else ()
        train, val, test = (part.select(clients) for part in (self.train, self.val, self.test))
        return replace(self, train=train, val=val, test=test, owners=owners)

    def copy_shared_samples(self) -> "ClientData":
        """Return data in which each client, and the server, has its own copy of shared samples.

        Returns ``self`` if no sample is shared.
        """
        parts = (self.train, self.val, self.test)
        index = torch.cat([*(part.index for part in parts), self.root])
        if len(index.unique()) == len(index):
            return self
        pieces = torch.arange(len(index)).split([*(len(p.index) for p in parts), len(self.root)])
        train, val, test = (Part(piece, part.offsets) for piece, part in zip(pieces, parts))
        return replace(
            self,
            inputs=select(self.inputs, index),
            targets=select(self.targets, index),
            groups=None if self.groups is None else self.groups[index],
            ids=index,
            train=train,
            val=val,
            test=test,
            root=pieces[-1],
        )

    def change_part(self, part: str, change: Callable[[Batch], Batch]) -> "ClientData":
        """Return data of one part's samples after a change; all three parts hold these samples.

        Args:
            part: ``train``, ``val`` or ``test``.
            change: The change. Samples with ``False`` in the mask of its result are left out.
        """
        source = self.part(part)
        index = source.index
        batch, owners = change(self.batch(index)), source.owners()
        inputs, targets = batch.inputs, batch.targets
        if batch.mask is not None:
            inputs, targets = select(inputs, batch.mask), select(targets, batch.mask)
            owners = owners[batch.mask.cpu()]
        sizes = owners.bincount(minlength=self.num_clients)
        changed = Part.from_sizes(torch.arange(count_samples(targets), device=index.device), sizes)
        return ClientData(inputs, targets, changed, changed, changed, self.num_classes)

    def class_counts(self, clients: Tensor) -> Tensor:
        """Return the number of training samples of each class, int64 [clients, classes].

        Args:
            clients: Client ids, int64 [clients].
        """
        counts = torch.zeros(len(clients), self.num_classes, dtype=torch.int64)
        for row, client in zip(counts, clients.tolist()):
            labels = gather(self.targets, self.train.samples(client)).cpu()
            row.copy_(labels.bincount(minlength=self.num_classes))
        return counts

    def training_samples(self, client: int) -> Batch:
        """Return all training samples of one client with their ids."""
        return self.batch(self.train.samples(client))

    def batch(self, index: Tensor) -> Batch:
        """Return the samples with some ids, int64 [n]; uint8 images become floats in [0, 1]."""
        return Batch(self.inputs_of(index), gather(self.targets, index), None, index)

    def inputs_of(self, index: Tensor) -> Tree:
        """Return the inputs of samples, int64 [n]; uint8 images become floats in [0, 1]."""
        if self.mapped:
            places = index.cpu()
            return tree_map(lambda leaf: self._read_rows(leaf, places, index), self.inputs)
        inputs = gather(self.inputs, index)
        if isinstance(inputs, Tensor) and inputs.dtype != torch.uint8:
            return inputs
        return tree_map(lambda leaf: scale_images(leaf, self.dtype), inputs)

    def read_samples(self, index: Tensor, keys: list[int]) -> tuple[Tree, Tree]:
        """Return inputs and targets of training samples, drawn anew if these are random.

        Args:
            index: Ids of the samples, int64 [n].
            keys: The key of the draws of each sample.

        Raises:
            ValueError: If a random sample cannot be read, or has another shape than before.
        """
        if self.redraw is None:
            return self.inputs_of(index), gather(self.targets, index)
        positions = index.cpu() if self.ids is None else self.ids[index.cpu()]
        inputs, targets = self.redraw(positions.tolist(), keys)
        fitted = tree_map(
            lambda rows, stored: rows.to(self.device, stored.dtype), targets, self.targets
        )
        return tree_map(self._fit_input, inputs, self.inputs), fitted

    def _fit_input(self, rows: Tensor, stored: Tensor) -> Tensor:
        """Return inputs that are drawn anew like stored ones after :meth:`inputs_of`."""
        is_integer = not stored.is_floating_point() and stored.dtype != torch.uint8
        if is_integer and not (self.mapped and not self.keeps_integers):
            return rows.to(self.device, stored.dtype)
        if rows.dtype == torch.uint8:
            return scale_images(rows, self.dtype).to(self.device)
        dtype = stored.dtype if stored.is_floating_point() and not self.mapped else self.dtype
        return to_real(rows, dtype).to(self.device)

    def _read_rows(self, leaf: Tensor, places: Tensor, like: Tensor) -> Tensor:
        """Return rows of a memory map on the device of a tensor, in the type of the models."""
        rows = to_device(leaf.index_select(0, places), like)
        if rows.dtype == torch.uint8:
            return scale_images(rows, self.dtype)
        is_kept = self.keeps_integers and not rows.is_floating_point()
        return rows if is_kept else to_real(rows, self.dtype)

    @property
    def device(self) -> torch.device:
        """The device of the samples."""
        return leaves(self.targets)[0].device

    @property
    def num_samples(self) -> int:
        """Number of samples of all clients."""
        return count_samples(self.targets)

    def pad_part(self, part: str, clients: Tensor) -> tuple[Tree, Tree]:
        """Return a part's samples of some clients, padded to the size of the largest client.

        Args:
            part: ``train``, ``val`` or ``test``.
            clients: Client ids, int64 [clients].

        Returns:
            Inputs and targets, both [clients, samples, ...]. The padding behind a client's own
            samples is its first sample; without any in this part, its first training sample.
        """
        source = self.part(part)
        slots, sizes = torch.arange(source.largest), source.sizes[clients, None]
        places = source.offsets[clients, None] + torch.where(slots < sizes, slots, 0)
        index = source.index[places.clamp_(max=len(source.index) - 1).to(source.index.device)]
        if not bool(sizes.all()):
            first = self.train.index[self.train.offsets[clients, None].to(self.train.index.device)]
            index = torch.where((sizes > 0).to(index.device), index, first)
        if self.mapped:
            rows = self.inputs_of(index.flatten())
            inputs = tree_map(lambda leaf: leaf.unflatten(0, index.shape), rows)
        else:
            inputs = select(self.inputs, index)
            inputs = tree_map(lambda leaf: scale_images(leaf, self.dtype), inputs)
        return inputs, select(self.targets, index)

    def to(self, device: torch.device, dtype: torch.dtype) -> "ClientData":
        """Return the data on a device, with floating-point numbers in the given dtype.

        Memory maps stay on the CPU in their own type.
        """
        train, val, test = (part.to(device) for part in (self.train, self.val, self.test))
        targets = move_tree(self.targets, device, dtype)
        inputs = self.inputs if self.mapped else move_tree(self.inputs, device, dtype)
        return replace(
            self,
            inputs=inputs,
            targets=targets,
            groups=None if self.groups is None else self.groups.to(device),
            train=train,
            val=val,
            test=test,
            root=self.root.to(device),
            dtype=dtype,
        )


def scale_images(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale uint8 images to floats in [0, 1]; return any other tensor unchanged."""
    if leaf.dtype != torch.uint8:
        return leaf
    return leaf.to(torch.float32).div_(255).to(dtype)


def move_tree(tree: Tree, device: torch.device, dtype: torch.dtype) -> Tree:
    """Return a tree on a device, with floating-point numbers in the given dtype."""
    return tree_map(
        lambda leaf: leaf.to(device, dtype) if leaf.is_floating_point() else leaf.to(device), tree
    )


def to_real(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in a floating-point type; by float32, unless it has 64 bits.

    Example:
        >>> to_real(torch.tensor([2**24 + 1]), torch.float64).tolist()
        [16777217.0]
    """
    return leaf.to(dtype) if dtype == torch.float64 else leaf.to(torch.float32).to(dtype)


def integers_to_floats(tree: Tree, dtype: torch.dtype = torch.float32) -> Tree:
    """Convert the integers of a tree to floats, except uint8 images: gathering scales those.

    Args:
        tree: The tree.
        dtype: The type of the models. Floats have 64 bits for models of 64 bits, and else 32.
    """

    def convert(leaf: Tensor) -> Tensor:
        """Return integers as floats; return floats and uint8 images unchanged."""
        unchanged = leaf.is_floating_point() or leaf.dtype == torch.uint8
        return leaf if unchanged else leaf.to(real)

    real = torch.float64 if dtype == torch.float64 else torch.float32
    return tree_map(convert, tree)
