"""All samples as tensors, and which of them are whose."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pl_fed.data.fingerprint import digest_of, digest_of_labels, digest_of_names
from pl_fed.trees import Tree, gather, leaves, rows_of, select, tree_map
from pl_fed.types import Batch


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
        """Join one index tensor per client."""
        return cls.from_sizes(torch.cat(pieces), torch.tensor([len(piece) for piece in pieces]))

    @classmethod
    def from_sizes(cls, index: Tensor, sizes: Tensor) -> "Part":
        """Take ids of samples, client after client, and the number of each client's."""
        return cls(index, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))

    @cached_property
    def sizes(self) -> Tensor:
        """Number of samples of each client, int64 [clients], on the CPU."""
        return self.offsets.diff()

    @cached_property
    def largest(self) -> int:
        """Number of samples of the client that has most."""
        return int(self.sizes.max()) if len(self.offsets) > 1 else 0

    def samples(self, client: int) -> Tensor:
        """Ids of one client's samples."""
        return self.index[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def owners(self) -> Tensor:
        """Whose each entry of ``index`` is, int64 [samples of the part]."""
        return torch.arange(len(self.sizes)).repeat_interleave(self.sizes)

    def split(self, sizes: Sequence[Tensor]) -> "list[Part]":
        """Cut each client's samples into pieces, one behind the other.

        Args:
            sizes: For each piece its size for each client, int64 [clients]; together the client's.
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
    """The data of a whole federation: gathered by index, never copied per client.

    Attributes:
        inputs: Inputs: a tensor [samples, ...], or a tuple or dict of such.
        targets: Targets: a tensor [samples, ...], or a tuple or dict of such.
        train: What the clients train on.
        val: What rounds are watched with.
        test: What a run is judged by.
        num_classes: Number of classes, if each target is a class id; else 0.
        root: Ids of training samples that the server has for itself, int64 [root samples].
        owners: Whose samples each client has, as the data call them: one or more for each client;
            empty if it was labels that were shared out.
        ids: Which sample of the data set each of these is, int64 [samples], on the CPU, where some
            are copies; ``None`` where they are the data set's own.
        dtype: Of the real numbers that images become when they are gathered: see :meth:`batch`.
        fingerprint: What :func:`fingerprint_of` gives for the data set's inputs, if it is known.
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

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.train.offsets) - 1

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digests of which client has which samples, of their labels, and of the clients' owners.

        Samples are named as in the data set, so that copies of them make no difference.
        """
        parts = (self.train, self.val, self.test)
        index = torch.cat([*(part.index for part in parts), self.root])
        samples = index if self.ids is None else self.ids[index]
        return {
            "samples": digest_of(samples, *(part.offsets for part in parts)),
            "labels": digest_of_labels(self.targets, index),
            "owners": digest_of_names(self.owners),
        }

    def part(self, name: str) -> Part:
        """Return the part called ``train``, ``val`` or ``test``."""
        part: Part = getattr(self, name)
        return part

    def copy_shared_samples(self) -> "ClientData":
        """Return the same with a copy of a sample for each client that holds it.

        The server's own samples have copies, too. Nothing is copied if nobody shares any.
        """
        parts = (self.train, self.val, self.test)
        index = torch.cat([*(part.index for part in parts), self.root])
        if len(index.unique()) == len(index):
            return self
        pieces = torch.arange(len(index)).split([*(len(p.index) for p in parts), len(self.root)])
        train, val, test = (Part(piece, part.offsets) for piece, part in zip(pieces, parts))
        own = {"train": train, "val": val, "test": test, "root": pieces[-1]}
        inputs, targets = select(self.inputs, index), select(self.targets, index)
        return replace(self, inputs=inputs, targets=targets, ids=index, **own)

    def change_part(self, part: str, change: Callable[[Batch], Batch]) -> "ClientData":
        """Return the samples of a part alone, changed: they are each part of the result.

        Args:
            part: ``train``, ``val`` or ``test``.
            change: Changes them; those that are false in the mask that it gives are left out.
        """
        chosen = self.part(part)
        index = chosen.index
        batch, owners = change(self.batch(index)), chosen.owners()
        inputs, targets = batch.inputs, batch.targets
        if batch.mask is not None:
            inputs, targets = select(inputs, batch.mask), select(targets, batch.mask)
            owners = owners[batch.mask.cpu()]
        sizes = owners.bincount(minlength=self.num_clients)
        own = Part.from_sizes(torch.arange(rows_of(targets), device=index.device), sizes)
        return ClientData(inputs, targets, own, own, own, self.num_classes)

    def training_samples(self, client: int) -> Batch:
        """Return all training samples of one client, with their ids."""
        return self.batch(self.train.samples(client))

    def batch(self, index: Tensor) -> Batch:
        """Return samples by their ids, int64 [n]; uint8 images become real numbers in [0, 1]."""
        return Batch(self.inputs_of(index), gather(self.targets, index), None, index)

    def inputs_of(self, index: Tensor) -> Tree:
        """Return the inputs of samples by their ids, as :meth:`batch` does."""
        inputs = gather(self.inputs, index)
        if isinstance(inputs, Tensor) and inputs.dtype != torch.uint8:
            return inputs
        return tree_map(lambda leaf: scale_images(leaf, self.dtype), inputs)

    @property
    def device(self) -> torch.device:
        """Where the samples are."""
        return leaves(self.targets)[0].device

    @property
    def num_samples(self) -> int:
        """Number of samples of all clients."""
        return rows_of(self.targets)

    def pad_part(self, part: str, clients: Tensor) -> tuple[Tree, Tree]:
        """Return a part's samples of some clients, as many rows for each as the largest client has.

        Args:
            part: ``train``, ``val`` or ``test``.
            clients: Ids, int64 [clients].

        Returns:
            Inputs [clients, samples, ...] and targets [clients, samples, ...]. Beyond a client's
            own there are whatever samples of other clients.
        """
        chosen = self.part(part)
        places = chosen.offsets[clients, None] + torch.arange(chosen.largest)
        index = chosen.index[places.clamp_(max=len(chosen.index) - 1).to(chosen.index.device)]
        inputs = tree_map(lambda leaf: scale_images(leaf, self.dtype), select(self.inputs, index))
        return inputs, select(self.targets, index)

    def to(self, device: torch.device, dtype: torch.dtype) -> "ClientData":
        """Return the data on a device, with all real numbers in the given dtype."""
        train, val, test = (
            Part(part.index.to(device), part.offsets) for part in (self.train, self.val, self.test)
        )
        inputs, targets = (move_tree(tree, device, dtype) for tree in (self.inputs, self.targets))
        root = self.root.to(device)
        return replace(
            self,
            inputs=inputs,
            targets=targets,
            train=train,
            val=val,
            test=test,
            root=root,
            dtype=dtype,
        )


def scale_images(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """Return images of uint8 as real numbers in [0, 1], and any other numbers as they are."""
    if leaf.dtype != torch.uint8:
        return leaf
    return leaf.to(torch.float32).div_(255).to(dtype)


def move_tree(tree: Tree, device: torch.device, dtype: torch.dtype) -> Tree:
    """Return a tree on a device, its real numbers in the given dtype."""
    return tree_map(
        lambda leaf: leaf.to(device, dtype) if leaf.is_floating_point() else leaf.to(device), tree
    )


def integers_to_floats(tree: Tree, dtype: torch.dtype = torch.float32) -> Tree:
    """Return a tree whose integers became real numbers, but for images, which do when gathered."""

    def as_float(leaf: Tensor) -> Tensor:
        """Return integers as real numbers; real numbers and images as they are."""
        unchanged = leaf.is_floating_point() or leaf.dtype == torch.uint8
        return leaf if unchanged else leaf.to(dtype)

    return tree_map(as_float, tree)
