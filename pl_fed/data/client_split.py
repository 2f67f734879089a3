"""The split of a data set over the clients, and of each client's samples into parts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from pl_fed.data.client_data import Part
from pl_fed.data.source import TEST, TRAIN, VAL, Arrays
from pl_fed.partitioners.base import Partitioner, check_parts
from pl_fed.random import generator, key, random_bits, uniforms
from pl_fed.tasks.own_batches import OwnBatches
from pl_fed.trees import describe

_MANY_CLIENTS = 10_000  # with more clients, the draws are vectorized


@dataclass(frozen=True)
class ClientSplit:
    """Client split: divides samples over the clients, and each client's samples into parts.

    Attributes:
        arrays: The samples.
        source: The name of the data source, for messages.
        partitioner: Divides the samples; ``None`` gives each client the samples of one owner.
        num_clients: Number of clients; ``None`` for the number of owners.
        split: ``"official"`` keeps the data set's parts, ``"own"`` cuts each client's samples;
            ``None`` takes official parts if there are any.
        test_fraction: Share of test samples where they are cut.
        val_fraction: Share of validation samples where they are cut.
        seed: The seed of the data.
        withheld: Ids of the samples that no client gets, int64 [samples]; the server has them.
        stable: Whether the part of each sample depends on its owner and its place among the
            owner's samples alone.
    """

    arrays: Arrays
    source: str
    partitioner: Partitioner | None
    num_clients: int | None
    split: str | None
    test_fraction: float
    val_fraction: float
    seed: int
    withheld: Tensor
    stable: bool = False

    def cut_parts(self) -> tuple[Part, Part, Part]:
        """Return the train, val and test parts of the clients.

        Official parts stay; a part that the data set lacks is cut from the training samples.
        """
        official = self.official
        samples = torch.arange(len(self.arrays))
        if len(self.withheld):
            samples = samples[~torch.isin(samples, self.withheld)]
        if self.arrays.split is None or len(official) < 2:
            pooled = self._split_clients(samples)
            return self._cut(pooled, self.test_fraction, self.val_fraction)
        parts = self.arrays.split[samples]
        train, val, test = (samples[parts == part] for part in (TRAIN, VAL, TEST))
        if not len(test):
            client_train, client_val = self._split_official(train, val)
            cut_train, _, cut_test = self._cut(client_train, self.test_fraction, 0.0)
            return cut_train, client_val, cut_test
        client_train, client_test = self._split_official(train, test)
        if len(val):
            return client_train, self._split_official(train, val)[1], client_test
        cut_train, cut_val, _ = self._cut(client_train, 0.0, self.val_fraction)
        return cut_train, cut_val, client_test

    @property
    def official(self) -> tuple[str, ...]:
        """The parts that clients keep as they are in the data set.

        Raises:
            ValueError: If the data set lacks a part that is needed.
        """
        needs = self.partitioner is not None and self.partitioner.needs_official is not None
        if self.split == "own" or (self.arrays.split is None and self.split is None and not needs):
            return ()
        name = self.source
        if self.arrays.split is None:
            raise ValueError(
                "Expected a data set with official parts for `split: official` but got"
                f" {name} without any: set `data.split: own`."
            )
        sizes = self.arrays.split.bincount(minlength=3).tolist()
        if (self.split == "official" or needs) and not (sizes[TRAIN] and sizes[TEST]):
            raise ValueError(
                "Expected a data set with official train and test parts for `split: official` but"
                f" got {sizes[TRAIN]} training and {sizes[TEST]} test samples: set `data.split:"
                " own`."
            )
        if not sizes[TRAIN]:
            raise ValueError(
                f"Expected a data set with a training part but got {name} with"
                f" {_describe_parts(sizes)}: set `data.split: own` to pool all samples and cut each"
                " client's."
            )
        return tuple(part for part, size in zip(("train", "val", "test"), sizes) if size)

    def report(self) -> None:
        """Report the choice of split if the data set has parts and ``split`` is not set.

        Warn of parts with several collate functions if their samples are pooled, and name owners
        that the partitioner does not regard.
        """
        is_by_owner = self.partitioner is None or self.partitioner.splits == "owners"
        if self.arrays.client is not None and not is_by_owner:
            rank_zero_info(
                f"{type(self.partitioner).__name__} splits the samples of {self.source} without"
                f" regard to their {len(self.arrays.client.unique())} owners: set"
                " `data.partitioner: null` and `data.num_clients: null` to make each a client."
            )
        batches = self.arrays.entries
        if isinstance(batches, OwnBatches) and len(self.official) < 2:
            functions = [getattr(f, "func", f) for f in batches.collates.values()]  # of a partial
            if len({getattr(f, "__qualname__", type(f).__qualname__) for f in functions}) > 1:
                rank_zero_warn(
                    f"The parts of {self.source} have several `collate_fn`, and batches of pooled"
                    " samples are joined by that of their first sample: give all dataloaders one"
                    " `collate_fn`, or leave `data.split` out."
                )
        if self.split is not None or self.arrays.split is None:
            return
        official = self.official
        if len(official) < 2:
            return
        sizes = self.arrays.split.bincount(minlength=3).tolist()
        use = f"pl_fed uses the official split of {self.source}"
        own = "set `data.split: own` to pool all samples and cut each client's"
        if "test" in official:
            rank_zero_info(f"{use} ({_describe_parts(sizes)}) and ignores `test_fraction`: {own}.")
        else:
            rank_zero_warn(
                f"{use} ({_describe_parts(sizes)}), keeps its val part, and cuts test samples from"
                " each client's training samples by `data.test_fraction` ="
                f" {self.test_fraction:g}, because it has no test part: {own}."
            )

    def _split_clients(self, samples: Tensor) -> Part:
        """Split samples over the clients, by their owners or by the partitioner."""
        if self.partitioner is None:
            ids = self._client_ids()
            sizes = ids[samples].bincount(minlength=int(ids.max()) + 1)
            return Part.from_sizes(samples[ids[samples].argsort(stable=True)], sizes)
        draw, clients = generator(self.seed, "partition"), self.num_clients or 0
        if self.partitioner.splits == "owners":  # an owner may have samples of several parts
            owners = self._sample_owners()
            selected = torch.zeros(len(owners), dtype=torch.bool)
            selected[samples] = True
            pieces = self.partitioner.split(owners, clients, draw)
            pieces = check_parts(self.partitioner, pieces, len(owners), clients)
            split = Part.from_pieces([piece[selected[piece]] for piece in pieces])
            _warn_if_shared(self.partitioner, split)
            return split
        with _explain_missing_classes(self.partitioner, self.arrays):
            pieces = self.partitioner.split(self.arrays.partition_labels[samples], clients, draw)
        split = Part.from_pieces(check_parts(self.partitioner, pieces, len(samples), clients))
        _warn_if_shared(self.partitioner, split)
        return Part(samples[split.index], split.offsets)

    def _split_official(self, train: Tensor, other: Tensor) -> tuple[Part, Part]:
        """Split the official train part and another part over the clients.

        A partitioner by labels gives each client the same class proportions in both.
        """
        if self.partitioner is None or self.partitioner.splits == "owners":
            return self._split_clients(train), self._split_clients(other)
        draw, clients = generator(self.seed, "partition"), self.num_clients or 0
        with _explain_missing_classes(self.partitioner, self.arrays):
            pieces, other_pieces = self.partitioner.split_matching(
                self.arrays.partition_labels[train],
                self.arrays.partition_labels[other],
                clients,
                draw,
            )
        split = Part.from_pieces(check_parts(self.partitioner, pieces, len(train), clients))
        matching = Part.from_pieces(
            check_parts(self.partitioner, other_pieces, len(other), clients)
        )
        _warn_if_shared(self.partitioner, split)
        return Part(train[split.index], split.offsets), Part(
            other[matching.index], matching.offsets
        )

    def _sample_owners(self) -> Tensor:
        if self.arrays.client is None:
            got = "None" if self.partitioner is None else type(self.partitioner).__name__
            raise ValueError(
                "Expected argument `partitioner` to be one that splits by labels, as"
                f" {self.source} records no owners of samples, but got {got}: set"
                " `data.partitioner`, for example `IID`."
            )
        return self.arrays.client

    def list_owners(self, parts: Sequence[Part]) -> list[list[str]]:
        """Return the owners of each client's samples; empty after a split by labels."""
        if self.arrays.client is None or (self.partitioner and self.partitioner.splits != "owners"):
            return []
        ids, owner = self.arrays.client.unique(return_inverse=True)
        client = torch.cat([part.owners() for part in parts])
        owner = owner[torch.cat([part.index for part in parts])]
        owners: list[list[str]] = [[] for _ in parts[0].sizes]
        for pair in (client * len(ids) + owner).unique().tolist():
            owners[pair // len(ids)].append(self.arrays.owner_name(int(ids[pair % len(ids)])))
        return owners

    def _client_ids(self) -> Tensor:
        """Return the client of each sample, int64 [samples]: the owners, numbered from 0."""
        ids: Tensor = torch.unique(self._sample_owners(), return_inverse=True)[1]
        number = int(ids.max()) + 1
        if self.num_clients not in (None, number):
            raise ValueError(
                f"Expected argument `num_clients` to be {number}, the number of client ids in the"
                f" data, or left out, but got {self.num_clients}: use the partitioner ByOwner for"
                " fewer clients with several ids each."
            )
        return ids

    def _cut(
        self, pooled: Part, test_fraction: float, val_fraction: float
    ) -> tuple[Part, Part, Part]:
        """Cut each client's samples at random into train, val and test."""
        if self.stable:
            return self._cut_stably(pooled, test_fraction, val_fraction)
        shuffled = Part(pooled.index[self._shuffle(pooled)], pooled.offsets)
        test_sizes, val_sizes = (
            (pooled.sizes.double() * share + 0.5).floor().long()
            for share in (test_fraction, val_fraction)
        )
        train_sizes = pooled.sizes - test_sizes - val_sizes
        test, val, train = shuffled.split([test_sizes, val_sizes, train_sizes])
        return train, val, test

    def _cut_stably(
        self, pooled: Part, test_fraction: float, val_fraction: float
    ) -> tuple[Part, Part, Part]:
        """Draw the part of each sample by its owner's name and its place among the owner's samples.

        New samples behind the owner's earlier ones, and new owners, leave the parts of all others.
        The first sample of an owner is a training sample, so that none has an empty part.
        """
        ids, owner = self._sample_owners()[pooled.index].unique(return_inverse=True)
        names = [self.arrays.owner_name(int(id)) for id in ids]
        keys = torch.tensor([key(self.seed, f"stable cut of {name}") for name in names])
        order = pooled.index.argsort(stable=True)
        order = order[owner[order].argsort(stable=True)]
        sizes = owner.bincount(minlength=len(ids))
        places = torch.empty_like(owner)
        places[order] = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[owner[order]]
        draws = uniforms(keys[owner], places)
        is_test = (draws < test_fraction) & (places > 0)
        is_val = (draws < test_fraction + val_fraction) & (places > 0) & ~is_test
        clients = pooled.owners()

        def select(selected: Tensor) -> Part:
            """Return the part with the selected samples."""
            sizes = clients[selected].bincount(minlength=len(pooled.sizes))
            return Part.from_sizes(pooled.index[selected], sizes)

        return select(~is_test & ~is_val), select(is_val), select(is_test)

    def _shuffle(self, pooled: Part) -> Tensor:
        """Return a random order of each client's samples, by a key for each client.

        Returns:
            Positions in ``pooled.index``, client after client.
        """
        if len(pooled.sizes) > _MANY_CLIENTS:
            owners = pooled.owners()
            places = torch.arange(len(owners)) - pooled.offsets[owners]
            keys = random_bits(key(self.seed, "cut"), torch.arange(len(pooled.sizes)))
            order = random_bits(keys[owners], places).argsort()
            return order[owners[order].argsort(stable=True)]
        return torch.cat(
            [
                begin + torch.randperm(size, generator=generator(self.seed, "cut", client))
                for client, (begin, size) in enumerate(
                    zip(pooled.offsets.tolist(), pooled.sizes.tolist())
                )
            ]
        )


@contextmanager
def _explain_missing_classes(partitioner: Partitioner, arrays: Arrays) -> Iterator[None]:
    """Replace the error of a partitioner by classes if the data have no class ids."""
    try:
        yield
    except TypeError as error:
        if not str(error).startswith("Expected argument `labels` to be class ids"):
            raise
        raise TypeError(
            f"Expected the data to have class ids for {type(partitioner).__name__}, which splits"
            f" classes, but got targets of {describe(arrays.targets)} and no `labels`: give the"
            " class of each sample as `labels` of the data source, or use the partitioner IID or"
            " Quantity, or ByOwner if the data set records owners."
        ) from error


def _describe_parts(sizes: Sequence[int]) -> str:
    return f"{sizes[TRAIN]} train, {sizes[VAL]} val and {sizes[TEST]} test samples"


def _warn_if_shared(partitioner: Partitioner, split: Part) -> None:
    """Warn if several clients have the same sample and the partitioner does not allow it."""
    if not partitioner.overlapping and len(split.index.unique()) < len(split.index):
        rank_zero_warn(
            f"{type(partitioner).__name__} gives a sample to several clients, so test samples of a"
            " client may be training samples of another: set its attribute `overlapping = True` to"
            " allow this."
        )
