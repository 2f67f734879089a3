"""The data of a federation as a LightningDataModule."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from pl_fed.arguments import check_choice, check_instances, check_integers
from pl_fed.configurable import Configurable
from pl_fed.data.client_data import ClientData, Part, scale_images
from pl_fed.data.fingerprint import fingerprint_of
from pl_fed.data.normalization import Normalization
from pl_fed.data.source import TEST, TRAIN, VAL, Arrays, DataSource
from pl_fed.partitioners.base import Partitioner, check_parts
from pl_fed.random import fork_torch_rng, generator, key, random_bits
from pl_fed.skews.base import Skew
from pl_fed.text import printable
from pl_fed.trees import Tree, describe, leaves, tree_map

_INTEGERS = (torch.bool, torch.int8, torch.int16, torch.int32, torch.int64)
_LARGE = 1 << 30  # bytes of images as real numbers, beyond which they stay uint8
_MANY_CLIENTS = 10_000  # beyond, all clients' samples are shuffled by one draw


class FederatedData(Configurable, LightningDataModule):
    """Samples, shared out over clients, each client's cut into train, val and test.

    Args:
        dataset: Where the samples come from.
        partitioner: Which client gets which samples. Leave it out where the data set says itself
            whose each sample is (an ``.npz`` with ``client``).
        num_clients: Number of clients; left out with the partitioner.
        batch_size: Samples in a training minibatch.
        split: ``"official"`` keeps the data set's own train / val / test: each client's test
            samples come from the official test set, in the client's own mix of classes, and val,
            where the data set has none, is cut from train. ``"own"`` pools all samples and cuts
            each client's at random by the fractions below. ``None`` is official where the data set
            has train and test parts, and says so once; else own.
        val_fraction: Share of a client's samples used for validation, in [0, 1).
        test_fraction: Share of a client's samples used for testing, in [0, 1); not with an
            official test set.
        normalize: ``"none"``; ``"channel"`` or ``"feature"`` subtract the mean and divide by the
            standard deviation over all training samples, of each channel (dimension 1; a constant
            one is divided by 1) or of each input number (where 0.001 is added to it, as in Ditto's
            code, but there to that of pixels in 0..255, which are scaled to [0, 1] here); or a pair
            of numbers or lists ``[mean, std]``, one per channel.
        transforms: Batched modules (``torchvision.transforms.v2``) applied once to all inputs,
            before they are normalised: images are in [0, 1] then. Random draws are keyed by the
            seed.
        skew: Changes each client's inputs in a way of its own: see :mod:`pl_fed.skews`.
        augment: Batched modules applied to each training minibatch of a client, after all else.
            Their random draws are keyed by round, client and step.
        drop_last: Whether a pass over a client's data leaves out its last, smaller minibatch.
        clients_per_eval_batch: Clients that validation or testing takes at a time: what Lightning
            calls a batch there, and what ``limit_val_batches`` counts.
        predict_clients: Ids of the clients that ``predict`` gives predictions for; all by default.
        root_samples: How many training samples the server has for itself, drawn at random from
            those of all clients, who lose them: for aggregators that need such (FLTrust).
        seed: Seed of the partition and of the cut, which is drawn for each client by itself, or for
            all at once if there are more than 10,000; ``None`` takes Lightning's global seed, or 0.

    Raises:
        ValueError: If an argument is out of range, or the clients cannot be formed.
    """

    def __init__(
        self,
        dataset: DataSource,
        partitioner: Partitioner | None = None,
        num_clients: int | None = None,
        batch_size: int = 10,
        split: Literal["own", "official"] | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        normalize: Literal["none", "channel", "feature"] | list[float] | list[list[float]] = "none",
        transforms: list[nn.Module] | None = None,
        skew: Skew | None = None,
        augment: list[nn.Module] | None = None,
        drop_last: bool = False,
        clients_per_eval_batch: int = 32,
        predict_clients: list[int] | None = None,
        root_samples: int = 0,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        check_instances(DataSource, dataset=dataset)
        check_instances(Partitioner, partitioner=partitioner)
        check_instances(Skew, skew=skew)
        check_integers(1, batch_size=batch_size, clients_per_eval_batch=clients_per_eval_batch)
        for name, share in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
            if not isinstance(share, float | int) or not 0 <= share < 1:
                raise ValueError(f"Expected argument `{name}` to lie in [0, 1) but got {share!r}.")
        if split != "official" and val_fraction + test_fraction >= 1:
            raise ValueError(
                "Expected arguments `val_fraction` + `test_fraction` to be below 1 but got"
                f" {val_fraction + test_fraction}: nothing would be left to train on."
            )
        if split is not None:
            check_choice(("own", "official"), split=split)
        if split == "own" and partitioner is not None and partitioner.needs_official:
            raise ValueError(
                f"Expected argument `split` to be official with `{partitioner.needs_official}` of"
                f" {type(partitioner).__name__} but got own: there is no official test set."
            )
        if isinstance(normalize, str):
            check_choice(("none", "channel", "feature"), normalize=normalize)
        if partitioner is not None and num_clients is None:
            raise ValueError(
                "Expected argument `num_clients` to be given with a `partitioner` but got None."
            )
        self.dataset = dataset
        self.partitioner = partitioner
        self.num_clients = num_clients
        self.batch_size = batch_size
        self.split = split
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.normalize = normalize
        self.transforms = [transforms] if isinstance(transforms, nn.Module) else transforms or []
        self.skew = skew
        self.augment: Callable[[Tree], Tree] | None = None
        if augment:
            each = [augment] if isinstance(augment, nn.Module) else augment
            self.augment = nn.Sequential(*each)
        self.drop_last = drop_last
        self.clients_per_eval_batch = clients_per_eval_batch
        self.predict_clients = predict_clients
        check_integers(0, root_samples=root_samples)
        if seed is not None:
            check_integers(-(2**63), 2**63 - 1, seed=seed)
        self.root_samples = root_samples
        self.seed = global_seed() if seed is None else seed
        self._clients: ClientData | None = None
        self._preparation: dict[str, Any] = {}

    def __str__(self) -> str:
        """Return whose data of which data set: Lightning's own would ask for samples."""
        who = type(self.partitioner).__name__ if self.partitioner else "by owner"
        many = "" if self.num_clients is None else f", {self.num_clients} clients"
        return f"{type(self).__name__}({type(self.dataset).__name__}, {who}{many})"

    @property
    def clients(self) -> ClientData:
        """The clients' data; loaded and shared out when first asked for."""
        if self._clients is None:
            arrays = self.dataset.load()
            if not isinstance(arrays, Arrays):
                raise TypeError(
                    f"Expected `load` of {type(self.dataset).__name__} to return Arrays but got"
                    f" {type(arrays).__name__}."
                )
            self._clients = self._share_out(arrays)
        return self._clients

    @property
    def preparation(self) -> dict[str, Any]:
        """What inputs went through, in this order: what those of a trained model must go through.

        ``dataset``, its ``class`` and its ``preparation``, in words; ``scale``, by which they were
        divided; ``transforms``, of which there is the text; ``skew``, the class that changed each
        client's, or ``None``; ``mean`` and ``std``, lists that broadcast over one sample, or
        ``None``. A skew may come after these.
        """
        _ = self.clients
        return self._preparation

    def prepare_data(self) -> None:
        """Load the data in one process of a node first: it may have to be fetched."""
        _ = self.clients

    def setup(self, stage: str | None = None) -> None:
        """Load the data and share it out."""
        wanted = self.predict_clients or []
        unknown = [k for k in wanted if not 0 <= k < self.clients.num_clients]
        if unknown:
            raise ValueError(
                f"Expected argument `predict_clients` to be ids from 0 to"
                f" {self.clients.num_clients - 1} but got {unknown}."
            )

    def train_dataloader(self) -> Any:
        """Return one entry per client: the loop draws the cohorts itself."""
        return ClientBatches(range(self.clients.num_clients), 1)

    def val_dataloader(self) -> Any:
        """Return batches of client ids: all clients are evaluated."""
        return self._evaluation_batches(range(self.clients.num_clients))

    def test_dataloader(self) -> Any:
        """Return batches of client ids: all clients are evaluated."""
        return self.val_dataloader()

    def predict_dataloader(self) -> Any:
        """Return batches of client ids: those asked for."""
        wanted = self.predict_clients
        return self._evaluation_batches(
            range(self.clients.num_clients) if wanted is None else wanted
        )

    def _evaluation_batches(self, clients: Sequence[int]) -> "ClientBatches":
        return ClientBatches(clients, self.clients_per_eval_batch)

    def _share_out(self, arrays: Arrays) -> ClientData:
        self._say_which_split(arrays)
        train, val, test = self._parts(arrays)
        train, root = self._without_root(train)
        self._check_training_data(arrays, train.sizes)
        targets = arrays.targets
        fingerprint = fingerprint_of(arrays.inputs)
        inputs = self._transformed(arrays)
        owners = self._owners_of_clients(arrays, (train, val, test))
        data = ClientData(inputs, targets, train, val, test, arrays.num_classes, root, owners)
        data = replace(data, fingerprint=fingerprint)
        if self.skew is not None:
            data = data.copy_shared_samples()
        data = self._skewed(data, after_normalizing=False)
        normalization = Normalization.of(data.inputs, self.normalize, data.train.index)
        if normalization is not None:
            data = replace(data, inputs=normalization(data.inputs))
        self._preparation = self._described(arrays, normalization)
        return self._skewed(data, after_normalizing=True)

    def _described(self, arrays: Arrays, normalization: Normalization | None) -> dict[str, Any]:
        found, source = normalization, self.dataset
        return {
            "dataset": {"class": type(source).__name__, "preparation": source.preparation},
            "scale": 255 if leaves(arrays.inputs)[0].dtype == torch.uint8 else 1,
            "transforms": [str(each) for each in self.transforms],
            "skew": None if self.skew is None else type(self.skew).__name__,
            "mean": None if found is None else found.mean[0].tolist(),
            "std": None if found is None else found.std[0].tolist(),
        }

    def _skewed(self, data: ClientData, after_normalizing: bool) -> ClientData:
        """Change the clients' inputs if it is time to."""
        if self.skew is None or self.skew.after_normalizing != after_normalizing:
            return data
        x, parts = data.inputs.clone(), (data.train, data.val, data.test)
        for client in range(data.num_clients):
            mine = torch.cat([part.samples(client) for part in parts])
            changed = self.skew.change(x[mine], client, data.num_clients, self.seed)
            kept = getattr(changed, "shape", None)
            if kept != x[mine].shape:
                got = type(changed).__name__ if kept is None else list(kept)
                raise ValueError(
                    f"Expected argument `skew` to keep the shape {list(x[mine].shape)} of inputs"
                    f" but {type(self.skew).__name__} gave {got}."
                )
            x[mine] = changed
        return replace(data, inputs=x)

    def _without_root(self, train: Part) -> tuple[Part, Tensor]:
        """Take the server's own samples from the clients."""
        if not self.root_samples:
            return train, train.index[:0]
        samples = train.index.unique()  # clients may share some
        if self.root_samples >= len(samples):
            raise ValueError(
                f"Expected argument `root_samples` to be below the {len(samples)} training samples"
                f" of all clients but got {self.root_samples}."
            )
        draw = torch.randperm(len(samples), generator=generator(self.seed, "root"))
        root = samples[draw[: self.root_samples]]
        kept = ~torch.isin(train.index, root)
        sizes = train.owners()[kept].bincount(minlength=len(train.sizes))
        return Part.from_sizes(train.index[kept], sizes), root

    def _check_training_data(self, arrays: Arrays, sizes: Tensor) -> None:
        empty = (sizes == 0).nonzero().flatten().tolist()
        if not empty:
            return
        who, hint = (
            f"client {empty[0]}",
            "use fewer clients, smaller fractions or another partitioner",
        )
        if self.partitioner is None and arrays.client is not None:
            owner = arrays.client.unique()[empty[0]]
            who += f" (id {printable(arrays.owner_name(int(owner)))} in the data)"
            hint = "leave such clients out of the data, or use smaller fractions"
            official = arrays.split if self._is_official(arrays) else None
            if official is not None and TRAIN not in official[arrays.client == owner]:
                hint = "use `split: own`, or the partitioner ByOwner for clients of several ids"
        if self.root_samples:
            hint += ", or fewer `root_samples`"
        raise ValueError(
            f"Expected every client to have training data but got none for {len(empty)} of"
            f" {len(sizes)} clients, the first being {who}: {hint}."
        )

    def _parts(self, arrays: Arrays) -> tuple[Part, Part, Part]:
        if not self._is_official(arrays):
            owned = self._owned(arrays, torch.arange(len(arrays)))
            return self._cut(owned, self.test_fraction)
        if arrays.split is None:
            raise ValueError(
                "Expected a data set with official parts for `split: official` but got"
                f" {type(self.dataset).__name__} without any: use `split: own`."
            )
        train, val, test = (
            (arrays.split == part).nonzero().flatten() for part in (TRAIN, VAL, TEST)
        )
        if not len(train) or not len(test):
            raise ValueError(
                "Expected a data set with official train and test parts for `split: official` but"
                f" got {len(train)} samples to train on and {len(test)} to test on: use"
                " `split: own`."
            )
        owned, owned_test = self._owned_matching(arrays, train, test)
        if len(val):
            return owned, self._owned_matching(arrays, train, val)[1], owned_test
        cut_train, cut_val, _ = self._cut(owned, test_fraction=0.0)
        return cut_train, cut_val, owned_test

    def _is_official(self, arrays: Arrays) -> bool:
        """Return whether the data set's own parts are kept."""
        if self.split is not None:
            return self.split == "official"
        needs = self.partitioner is not None and self.partitioner.needs_official is not None
        return needs or (arrays.split is not None and _has_parts(arrays.split))

    def _say_which_split(self, arrays: Arrays) -> None:
        """Say which split is used where the data set has parts and ``split`` does not say."""
        if self.split is not None or arrays.split is None:
            return
        name, parts = type(self.dataset).__name__, arrays.split.bincount(minlength=3).tolist()
        sizes = f"{parts[TRAIN]} train, {parts[VAL]} val and {parts[TEST]} test samples"
        if self._is_official(arrays):
            rank_zero_info(
                f"The official split of {name} is used ({sizes}), and `test_fraction` is not:"
                " `data.split: own` would pool all samples and cut each client's."
            )
        else:
            rank_zero_warn(
                f"The official split of {name} is not used, as it lacks a part ({sizes}): all"
                " samples are pooled, and each client's are cut by the fractions. Set"
                " `data.split: own` if that is meant."
            )

    def _owned(self, arrays: Arrays, samples: Tensor) -> Part:
        """Which of the samples each client owns."""
        if self.partitioner is None:
            ids = self._own_ids(arrays)
            sizes = ids[samples].bincount(minlength=int(ids.max()) + 1)
            return Part.from_sizes(samples[ids[samples].argsort(stable=True)], sizes)
        draw, clients = generator(self.seed, "partition"), self.num_clients or 0
        if self.partitioner.splits == "owners":  # they may have samples of several official parts
            owners = self._owners(arrays)
            chosen = torch.zeros(len(owners), dtype=torch.bool)
            chosen[samples] = True
            whole = self.partitioner.split(owners, clients, draw)
            whole = check_parts(self.partitioner, whole, len(owners), clients)
            _say_if_shared(
                self.partitioner, split := Part.from_pieces([one[chosen[one]] for one in whole])
            )
            return split
        with _explaining_labels(self.partitioner, arrays):
            given = self.partitioner.split(arrays.labels[samples], clients, draw)
        split = Part.from_pieces(check_parts(self.partitioner, given, len(samples), clients))
        _say_if_shared(self.partitioner, split)
        return Part(samples[split.index], split.offsets)

    def _owned_matching(self, arrays: Arrays, train: Tensor, other: Tensor) -> tuple[Part, Part]:
        """The same for an official part, in each client's own mix of classes."""
        if self.partitioner is None or self.partitioner.splits == "owners":
            return self._owned(arrays, train), self._owned(arrays, other)
        draw, clients = generator(self.seed, "partition"), self.num_clients or 0
        with _explaining_labels(self.partitioner, arrays):
            split = self.partitioner.split_matching(
                arrays.labels[train], arrays.labels[other], clients, draw
            )
        owned, matching = (
            Part.from_pieces(check_parts(self.partitioner, each, len(of), clients))
            for each, of in zip(split, (train, other))
        )
        _say_if_shared(self.partitioner, owned)
        return Part(train[owned.index], owned.offsets), Part(
            other[matching.index], matching.offsets
        )

    def _owners(self, arrays: Arrays) -> Tensor:
        if arrays.client is None:
            given = "None" if self.partitioner is None else type(self.partitioner).__name__
            raise ValueError(
                "Expected argument `partitioner` to be one that splits by labels, as"
                f" {type(self.dataset).__name__} does not say whose each sample is, but got"
                f" {given}."
            )
        return arrays.client

    def _owners_of_clients(self, arrays: Arrays, parts: Sequence[Part]) -> list[list[str]]:
        """Return whose samples each client has, if it is owners that are shared out."""
        if arrays.client is None or (self.partitioner and self.partitioner.splits != "owners"):
            return []
        ids, owner = arrays.client.unique(return_inverse=True)
        client = torch.cat([part.owners() for part in parts])
        owner = owner[torch.cat([part.index for part in parts])]
        of_each: list[list[str]] = [[] for _ in parts[0].sizes]
        for pair in (client * len(ids) + owner).unique().tolist():
            of_each[pair // len(ids)].append(arrays.owner_name(int(ids[pair % len(ids)])))
        return of_each

    def _own_ids(self, arrays: Arrays) -> Tensor:
        ids: Tensor = torch.unique(self._owners(arrays), return_inverse=True)[1]
        found = int(ids.max()) + 1
        if self.num_clients not in (None, found):
            raise ValueError(
                f"Expected argument `num_clients` to be {found}, the number of client ids in the"
                f" data, or left out, but got {self.num_clients}: for fewer clients, of several"
                " such ids each, give the partitioner ByOwner."
            )
        return ids

    def _cut(self, owned: Part, test_fraction: float) -> tuple[Part, Part, Part]:
        """Cut each client's samples at random into train, val and test."""
        shuffled = Part(owned.index[self._order(owned)], owned.offsets)
        test, val = (
            (owned.sizes.double() * share + 0.5).floor().long()
            for share in (test_fraction, self.val_fraction)
        )
        in_order = shuffled.split([test, val, owned.sizes - test - val])
        return in_order[2], in_order[1], in_order[0]

    def _order(self, owned: Part) -> Tensor:
        """A random order of each client's samples: its own draw, or one for all if they are many.

        Returns:
            Positions in ``owned.index``, client after client.
        """
        if len(owned.sizes) > _MANY_CLIENTS:
            counters = torch.arange(len(owned.index))
            order = random_bits(key(self.seed, "cut"), counters).argsort()
            return order[owned.owners()[order].argsort(stable=True)]
        return torch.cat(
            [
                begin + torch.randperm(size, generator=generator(self.seed, "cut", client))
                for client, (begin, size) in enumerate(
                    zip(owned.offsets.tolist(), owned.sizes.tolist())
                )
            ]
        )

    def _transformed(self, arrays: Arrays) -> Tree:
        """Return the inputs as real numbers, after the transforms.

        Integers that are no images stay integers if nothing is to change them: they may be ids.
        """
        changed = {
            "transforms": bool(self.transforms),
            "normalize": self.normalize != "none",
            "skew": self.skew is not None,
        }
        if not isinstance(arrays.inputs, Tensor):
            for name, is_set in changed.items():
                if is_set:
                    raise ValueError(
                        f"Expected argument `{name}` to be left out for inputs of several tensors"
                        f" ({describe(arrays.inputs)}) but got {getattr(self, name)}: change them"
                        " in the data source."
                    )
            return tree_map(_real_numbers, arrays.inputs)
        if not any(changed.values()):
            return _real_numbers(arrays.inputs)
        x = arrays.inputs.to(torch.float32)
        if arrays.inputs.dtype == torch.uint8:
            x /= 255
        with fork_torch_rng(x.device) as seed:
            for position, transform in enumerate(self.transforms):
                seed(key(self.seed, "transforms", position))
                x = transform(x)
                if len(x) != len(arrays):
                    raise ValueError(
                        "Expected each of `transforms` to keep the number of samples"
                        f" ({len(arrays)}) but got {len(x)} from {type(transform).__name__}."
                    )
        return x


@contextmanager
def _explaining_labels(partitioner: Partitioner, arrays: Arrays) -> Iterator[None]:
    """Say of a partitioner by classes that the data has none."""
    try:
        yield
    except TypeError as error:
        if not str(error).startswith("Expected argument `labels` to be class ids"):
            raise
        raise TypeError(
            f"Expected the data to have class ids for {type(partitioner).__name__}, which shares"
            f" out classes, but got targets of {describe(arrays.targets)}: take the partitioner"
            " IID or Quantity, or ByOwner where the data say whose each sample is."
        ) from error


def _real_numbers(leaf: Tensor) -> Tensor:
    """Return real numbers in float32, images scaled to [0, 1], and other integers as they are.

    Images that would take more than 1 GB stay uint8 until they are in a minibatch.
    """
    if leaf.dtype == torch.uint8:
        return leaf if 4 * leaf.nbytes > _LARGE else scale_images(leaf, torch.float32)
    return leaf.to(torch.float32) if leaf.dtype not in _INTEGERS else leaf


def _has_parts(split: Tensor) -> bool:
    """Return whether there are samples both to train on and to test on."""
    return bool((split == TRAIN).any()) and bool((split == TEST).any())


def _say_if_shared(partitioner: Partitioner, split: Part) -> None:
    if not partitioner.overlapping and len(split.index.unique()) < len(split.index):
        rank_zero_warn(
            f"{type(partitioner).__name__} gives samples to several clients each, so that one's"
            " test samples may be another's training samples: let its `overlapping` be True if that"
            " is meant."
        )


class ClientBatches:
    """Client ids in batches: what stands in for a DataLoader, which would load single samples.

    Args:
        clients: Ids.
        size: Ids in a batch.

    Example:
        >>> [batch.tolist() for batch in ClientBatches(range(3), 2)]
        [[0, 1], [2]]
    """

    def __init__(self, clients: Sequence[int], size: int) -> None:
        self.clients = clients
        self.size = size

    def __len__(self) -> int:
        return -(-len(self.clients) // self.size)

    def __iter__(self) -> Iterator[Tensor]:
        for begin in range(0, len(self.clients), self.size):
            yield torch.tensor(self.clients[begin : begin + self.size], dtype=torch.int64)


def global_seed() -> int:
    """Return the seed that ``seed_everything`` has set, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED") or 0)
