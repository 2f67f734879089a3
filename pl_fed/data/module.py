"""The data of a federation as a LightningDataModule."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils.data import Dataset

from pl_fed.arguments import check_choice, check_instances, check_integers, check_interval
from pl_fed.configurable import Configurable
from pl_fed.data.augmentation import Augmentation
from pl_fed.data.central import CentralParts, check_central
from pl_fed.data.client_data import ClientData, Part, scale_images
from pl_fed.data.client_split import ClientSplit
from pl_fed.data.columns import find_two_forms
from pl_fed.data.fingerprint import fingerprint_of
from pl_fed.data.held_out import HeldOut, check_held_out, mark_held_out
from pl_fed.data.normalization import Normalization
from pl_fed.data.rounding import warn_of_rounding
from pl_fed.data.source import TRAIN, Arrays, DataSource
from pl_fed.partitioners.base import Partitioner
from pl_fed.random import fork_torch_rng, generator, key
from pl_fed.skews.base import Skew
from pl_fed.tasks.own_batches import OwnBatches
from pl_fed.text import escape_controls
from pl_fed.trees import Tree, describe, leaves, tree_map

Redraw = Callable[[list[int], list[int]], tuple[Tree, Tree]]

_INTEGERS = (torch.bool, torch.int8, torch.int16, torch.int32, torch.int64)
_UNSIGNED = (torch.uint32, torch.uint64)
_MINIBATCHES = (10, False)  # batch size, and whether the last is dropped, without a dataloader
_LARGE = 1 << 30  # largest size of images in float32, in bytes; larger images stay uint8
_OWN = "that steps read as the data set's own batches"
_EVALUATED = (32, 4096)  # smallest and largest default number of clients in an evaluation batch


class FederatedData(Configurable, LightningDataModule):
    """Federated data: the samples of a data set, split over clients and into train, val and test.

    Args:
        dataset: The source of the samples.
        partitioner: Splits the samples over clients. Leave it out to use the owners that the data
            set records, such as ``client`` of an ``.npz``.
        num_clients: Number of clients. Required with a partitioner; without one, it is the number
            of owners and can be left out.
        batch_size: Samples in a training minibatch. ``None`` for that of the training dataloader
            of a LightningDataModule, or else 10.
        split: ``"official"`` keeps the data set's own train, val and test parts. Each client's test
            samples then come from the official test set, in the class proportions of its training
            samples. Without an official val part, val is cut from train. ``"own"`` pools all
            samples and cuts each client's at random by the fractions below. ``None`` keeps all
            parts that the data set has, and cuts the others from train; a message says so. Without
            parts, it means own.
        val_fraction: Fraction of a client's samples for validation, in [0, 1).
        test_fraction: Fraction of a client's samples for testing, in [0, 1). Not used with an
            official test set.
        normalize: ``"none"``, ``"channel"``, ``"feature"``, or a pair ``[mean, std]`` of numbers or
            of lists with one number per channel. The modes subtract the mean and divide by the
            standard deviation over all training samples. ``"channel"`` computes them per channel
            (dimension 1); a constant channel is divided by 1. ``"feature"`` computes them per input
            number and adds 0.001 to the standard deviation. Ditto's code adds the same to pixels in
            0..255; here pixels are in [0, 1]. Of inputs of several tensors, those of real numbers
            and images are normalized, each by itself.
        transforms: Batched modules (``torchvision.transforms.v2``), applied once to all inputs
            before normalization; images are in [0, 1] there. Random draws depend on ``seed``.
            In Python also a function, or one module alone.
        skew: A change of the inputs that differs between clients: see :mod:`pl_fed.skews`.
        augment: Batched modules, applied to each training minibatch of a client as the last step of
            its preparation. Random draws depend on round, client and step. A
            :class:`~pl_fed.data.KeyedAugmentation` changes the samples of all clients in one call.
            In Python also a function, or one module alone.
        drop_last: Whether a pass over a client's data leaves out its last, smaller minibatch.
            ``None`` for the choice of the training dataloader, or else false.
        min_batch: Samples in the smallest training minibatch, from 1 to ``batch_size``. A pass over
            a client's data leaves out a smaller last one, and a client with fewer samples in all
            takes no step: with 2, no BatchNorm layer gets a single sample.
        clients_per_eval_batch: Clients in an evaluation batch. Lightning counts these batches, for
            example in ``limit_val_batches``. ``None`` takes a hundredth of the clients, but at
            least 32 and at most 4,096: many small models are evaluated together.
        predict_clients: Ids of the clients to predict for; ``None`` means all.
        root_samples: Number of training samples that the server takes from the clients, at random,
            for aggregators such as FLTrust. The clients no longer have them.
        central: The server's own validation and test samples: each evaluation measures the global
            model on them, too, under ``val/central/`` and ``test/central/``. ``"official"`` takes
            the data set's own val and test parts; without a val part, ``val_fraction`` of its
            training samples, which no client gets then. The clients' test samples are official
            ones, too, unless ``split`` is own: then each client's samples are cut from the others.
            A data source has samples of its own, with the classes and shapes of the clients'; of
            its official parts, val and test count, and samples without parts are divided in the
            proportion of ``val_fraction`` and ``test_fraction``. A skew does not change central
            samples. ``None`` evaluates on the clients' samples alone.
        seed: Seed of the data split. Each client's cut has a draw of its own; with more than 10,000
            clients, one draw cuts all. ``None`` uses Lightning's global seed, or 0.
        held_out_clients: Clients that never train, and that evaluations report by themselves, like
            clients that arrive after training: a share (a float, such as ``0.2``), a number (an
            int), or a list of owners' names. The seed draws a share or a number. They take no part
            in cohorts, attacks and statistics of training samples.
        stable_cut: Whether a sample's part, where parts are cut, depends only on the seed, the name
            of its owner, and its place among the owner's samples. Then new samples behind the
            earlier ones, and new owners, leave all other samples in their parts, as a run needs
            that goes on with them. The sizes of parts vary around the fractions.

    Raises:
        ValueError: If an argument is out of range, or the clients cannot be formed.
    """

    def __init__(
        self,
        dataset: DataSource,
        partitioner: Partitioner | None = None,
        num_clients: int | None = None,
        batch_size: int | None = None,
        split: Literal["own", "official"] | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        normalize: Literal["none", "channel", "feature"] | list[float] | list[list[float]] = "none",
        transforms: list[nn.Module] | None = None,
        skew: Skew | None = None,
        augment: list[nn.Module] | None = None,
        drop_last: bool | None = None,
        min_batch: int = 1,
        clients_per_eval_batch: int | None = None,
        predict_clients: list[int] | None = None,
        root_samples: int = 0,
        central: Literal["official"] | DataSource | None = None,
        seed: int | None = None,
        held_out_clients: int | float | list[str] | None = None,
        stable_cut: bool = False,
    ) -> None:
        super().__init__()
        _check_source(dataset)
        _check_central(central)
        check_instances(Partitioner, partitioner=partitioner)
        check_instances(Skew, skew=skew)
        size = 1 if batch_size is None else batch_size
        evaluated = 1 if clients_per_eval_batch is None else clients_per_eval_batch
        check_integers(1, batch_size=size, clients_per_eval_batch=evaluated)
        largest = min_batch if batch_size is None else batch_size  # a dataloader may have another
        check_integers(1, largest, min_batch=min_batch)
        check_interval("[0, 1)", val_fraction=val_fraction, test_fraction=test_fraction)
        if split != "official" and val_fraction + test_fraction >= 1:
            raise ValueError(
                "Expected arguments `val_fraction` + `test_fraction` to be below 1 but got"
                f" {val_fraction + test_fraction}: no training samples would remain."
            )
        if split is not None:
            check_choice(("own", "official"), split=split)
        if split == "own" and partitioner is not None and partitioner.needs_official:
            raise ValueError(
                f"Expected argument `split` to be official with `{partitioner.needs_official}` of"
                f" {type(partitioner).__name__} but got own: there is no official test set."
            )
        if normalize is None or isinstance(normalize, str):
            check_choice(("none", "channel", "feature"), normalize=normalize)
        if partitioner is not None and num_clients is None:
            raise ValueError(
                "Expected argument `num_clients` to be set with a partitioner but got None: set"
                " `data.num_clients`, for example `10`."
            )
        self.dataset = dataset
        self.partitioner = partitioner
        self.num_clients = num_clients
        self._batch_size = batch_size
        self.split = split
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.normalize = normalize
        self.transforms = _list_changes(transforms)
        self.skew = skew
        self.augment: Augmentation | None = None
        if augment:
            self.augment = Augmentation(_list_changes(augment))
        self._drop_last = drop_last
        self.min_batch = min_batch
        self.clients_per_eval_batch = clients_per_eval_batch
        self.predict_clients = predict_clients
        check_integers(0, root_samples=root_samples)
        if seed is not None:
            check_integers(-(2**63), 2**63 - 1, seed=seed)
        check_held_out(held_out_clients)
        _check_stable_cut(stable_cut, partitioner)
        self.stable_cut = stable_cut
        self.held_out_clients: HeldOut | None = held_out_clients
        self.root_samples = root_samples
        self.central = central
        self.seed = global_seed() if seed is None else seed
        self._clients: ClientData | None = None
        self._central: ClientData | None = None
        self._draws_central = False
        self._held_out: ClientData | None = None
        self._validated: list[int] | None = None
        self._has_doubles = False  # whether the type of the inputs depends on the precision
        self._built_for: torch.dtype | None = None
        self._preparation: dict[str, Any] = {}

    def __str__(self) -> str:
        """Return data set, partitioner and number of clients; Lightning's text would load data."""
        partitioner = type(self.partitioner).__name__ if self.partitioner else "by owner"
        number = "" if self.num_clients is None else f", {self.num_clients} clients"
        return f"{type(self).__name__}({type(self.dataset).__name__}, {partitioner}{number})"

    @property
    def clients(self) -> ClientData:
        """The training clients' data; the first access loads and splits the data set."""
        if self._clients is None or (self._has_doubles and self._built_for != self._real_type()):
            arrays = _load(self.dataset)
            size, _ = self.dataset.minibatches or _MINIBATCHES
            check_integers(1, self._batch_size or size, min_batch=self.min_batch)
            self._clients, self._held_out = self._build_clients(arrays)
            changes = self.normalize != "none" or bool(self.transforms)
            wide = (torch.float64, *(_INTEGERS if changes else ()))
            self._has_doubles = any(leaf.dtype in wide for leaf in leaves(arrays.inputs))
            self._built_for = self._real_type()
        return self._clients

    @property
    def draws_server_samples(self) -> str | None:
        """The argument by which the server draws samples from the clients' training samples."""
        if self.root_samples:
            return "root_samples"
        return "central" if self._draws_central else None

    @property
    def central_data(self) -> ClientData | None:
        """The server's validation and test samples, as those of one client; ``None`` without any.

        They are prepared like the clients' inputs, with the numbers of the clients' training
        samples.
        """
        _ = self.clients
        return self._central

    @property
    def held_out(self) -> ClientData | None:
        """The data of the held-out clients; they share the samples' tensors with :attr:`clients`.

        Evaluations number them after the training clients. ``None`` if all clients train.
        """
        _ = self.clients
        return self._held_out

    @property
    def num_evaluated(self) -> int:
        """The number of clients that evaluations see: training clients and held-out clients."""
        return self.clients.num_clients + (self.held_out.num_clients if self.held_out else 0)

    @property
    def evaluated_owners(self) -> list[Sequence[str]]:
        """The names of the owners of each client that evaluations see; empty if they have none."""
        return [*self.clients.owners, *(self.held_out.owners if self.held_out else ())]

    def _real_type(self) -> torch.dtype | None:
        """Return float64 for a trainer in 64 bits, else float32; ``None`` without a trainer.

        Inputs are converted to float32 before normalization, which halves the memory of a run.
        Without a trainer, inputs of 64 bits keep their type.
        """
        trainer = self.trainer
        if trainer is None:
            return None
        if str(trainer.precision) == "64-true":
            return torch.float64
        net = trainer.lightning_module
        is_double = net is not None and any(p.dtype == torch.float64 for p in net.parameters())
        return torch.float64 if is_double else torch.float32

    @property
    def batch_size(self) -> int:
        """Samples in a training minibatch."""
        return self._find_minibatches()[0] if self._batch_size is None else self._batch_size

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        self._batch_size = value

    @property
    def drop_last(self) -> bool:
        """Whether a pass over a client's data leaves out its last, smaller minibatch."""
        return self._find_minibatches()[1] if self._drop_last is None else self._drop_last

    @drop_last.setter
    def drop_last(self, value: bool | None) -> None:
        self._drop_last = value

    def _find_minibatches(self) -> tuple[int, bool]:
        """Return the batch size and ``drop_last`` of the data source, or the defaults."""
        _ = self.clients  # the source knows them after loading
        return self.dataset.minibatches or _MINIBATCHES

    @property
    def preparation(self) -> dict[str, Any]:
        """The preparation of the inputs, in its order; new inputs of a trained model need the same.

        - ``dataset``: the ``class`` of the data source and its ``preparation`` in words.
        - ``scale``: the divisor of the inputs, 255 or 1.
        - ``transforms``: the text of each transform.
        - ``skew``: the name of the skew's class, or ``None``. Some skews come after normalization.
        - ``mean``, ``std``: lists that broadcast over one sample, or ``None``.
        """
        _ = self.clients
        return self._preparation

    def prepare_data(self) -> None:
        """Load the data in one process of each node first: loading may download it."""
        _ = self.clients

    def setup(self, stage: str | None = None) -> None:
        """Load the data, split it over the clients and check ``predict_clients``."""
        requested = self.predict_clients or []
        unknown = [k for k in requested if not 0 <= k < self.num_evaluated]
        if unknown:
            raise ValueError(
                f"Expected argument `predict_clients` to be ids from 0 to"
                f" {self.num_evaluated - 1} but got {unknown}."
            )

    def end_workers(self) -> None:
        """End the processes that read batches ahead; later steps start new ones."""
        for data in (self._clients, self._central):
            if data is not None and data.own_batches is not None:
                data.own_batches.end_workers()

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Return a batch as it is: client ids stay on the CPU; their samples are on the device."""
        return batch

    def train_dataloader(self) -> Any:
        """Return one entry per client: the training loop draws the cohorts."""
        return ClientBatches(range(self.clients.num_clients), 1)

    def val_dataloader(self) -> Any:
        """Return the ids of all clients, or of those of :meth:`limit_validation`, in batches."""
        if self._validated is not None:
            return self._evaluation_batches(self._validated)
        return self.test_dataloader()

    def limit_validation(self, clients: Tensor | None) -> None:
        """Choose the clients of validations: these ids, int64, or ``None`` for all clients."""
        self._validated = None if clients is None else clients.tolist()

    def test_dataloader(self) -> Any:
        """Return the ids of all clients in batches."""
        return self._evaluation_batches(range(self.num_evaluated))

    def predict_dataloader(self) -> Any:
        """Return the ids of ``predict_clients`` in batches."""
        requested = self.predict_clients
        return self._evaluation_batches(
            range(self.num_evaluated) if requested is None else requested
        )

    def _evaluation_batches(self, clients: Sequence[int]) -> "ClientBatches":
        size = self.clients_per_eval_batch
        if size is None:
            smallest, largest = _EVALUATED
            size = min(max(smallest, -(-self.num_evaluated // 100)), largest)
        return ClientBatches(clients, size)

    def _build_clients(self, arrays: Arrays) -> tuple[ClientData, ClientData | None]:
        """Return the data of the training clients and of the held-out clients, if there are any."""
        source, central = type(self.dataset).__name__, None
        if self.central == "official":
            central = CentralParts.draw_official(
                arrays, source, self.split, self.val_fraction, self.seed
            )
            self._draws_central = central.is_drawn
        split = ClientSplit(
            arrays,
            source,
            self.partitioner,
            self.num_clients,
            self.split,
            self.test_fraction,
            self.val_fraction,
            self.seed,
            torch.empty(0, dtype=torch.int64) if central is None else central.withheld,
            self.stable_cut,
        )
        split.report()
        train, val, test = split.cut_parts()
        is_held_out = self._mark_held_out(split, (train, val, test))
        train, root = self._draw_root(train, is_held_out)
        self._check_training_data(split, train.sizes)
        targets = arrays.targets
        fingerprint = fingerprint_of(arrays.inputs)
        inputs = self._transform_inputs(arrays)
        owners = split.list_owners((train, val, test))
        data = ClientData(inputs, targets, train, val, test, arrays.num_classes, root, owners)
        data = replace(data, fingerprint=fingerprint, mapped=arrays.mapped, entries=arrays.entries)
        data = replace(data, evaluation_sizes=self.dataset.evaluation_sizes or {})
        data = replace(data, class_names=tuple(map(str, arrays.class_names)))
        data = replace(data, groups=arrays.groups, group_names=arrays.list_group_names())
        data = replace(data, ordered_draws=arrays.ordered_draws)
        is_image = any(leaf.dtype == torch.uint8 for leaf in leaves(arrays.inputs))
        data = replace(data, scales_images=is_image)
        official = split.official if len(split.official) > 1 else ()
        keeps_parts = self.stable_cut or len(official) == 3
        data = replace(data, official=official, keeps_parts=keeps_parts)
        without_skew = data
        if self.skew is not None:
            data = data.copy_shared_samples()
        data = self._apply_skew(data, after_normalizing=False)
        training_clients = (~is_held_out).nonzero().flatten()
        normalization = self._fit_normalization(data, data.train.select(training_clients).index)
        data = replace(data, inputs=tree_map(_normalize, data.inputs, normalization))
        if central is not None and self.skew is None:
            self._central = central.select(data)
        elif central is not None:
            inputs = tree_map(_normalize, without_skew.inputs, normalization)
            self._central = central.select(replace(without_skew, inputs=inputs))
        elif isinstance(self.central, DataSource):
            self._central = self._build_central(self.central, without_skew, normalization)
        if arrays.redraw is not None:
            data = replace(data, redraw=partial(_redraw_inputs, arrays.redraw, normalization))
        self._preparation = self._describe_preparation(arrays, normalization)
        data = self._apply_skew(data, after_normalizing=True)
        if not is_held_out.any():
            return data, None
        held_out = is_held_out.nonzero().flatten()
        return data.select(training_clients), data.select(held_out)

    def _build_central(
        self, source: DataSource, clients: ClientData, normalization: Tree
    ) -> ClientData:
        """Return the samples of the server's own data source, prepared like the clients'."""
        arrays = _load(source)
        parts = CentralParts.draw_own(arrays, self.val_fraction, self.test_fraction, self.seed)
        inputs = self._transform_inputs(arrays)
        check_central(source, arrays, inputs, clients, self.dataset.columns)
        inputs = tree_map(_normalize, inputs, normalization)
        return parts.select(
            replace(
                clients,
                inputs=inputs,
                targets=arrays.targets,
                ids=None,
                groups=None,
                mapped=arrays.mapped,
                fingerprint=fingerprint_of(arrays.inputs),
            )
        )

    def _mark_held_out(self, split: ClientSplit, parts: tuple[Part, Part, Part]) -> Tensor:
        """Return a mask of the held-out clients, bool [clients]."""
        num_clients = len(parts[0].sizes)
        if self.held_out_clients is None:
            return torch.zeros(num_clients, dtype=torch.bool)
        owners = split.list_owners(parts)
        return mark_held_out(self.held_out_clients, num_clients, owners, self.seed)

    def _fit_normalization(self, data: ClientData, samples: Tensor) -> Tree:
        """Return the normalization of each tensor of the inputs; ``None`` for integers.

        Args:
            data: The data of all clients.
            samples: Ids of the training samples of the clients that train, int64.
        """
        return tree_map(
            lambda leaf: (
                Normalization.fit(leaf, self.normalize, samples)
                if leaf.is_floating_point()
                else None
            ),
            data.inputs,
        )

    def _describe_preparation(self, arrays: Arrays, normalization: Tree) -> dict[str, Any]:
        return {
            "dataset": {
                "class": type(self.dataset).__name__,
                "preparation": self.dataset.preparation,
            },
            "scale": 255 if leaves(arrays.inputs)[0].dtype == torch.uint8 else 1,
            "transforms": [str(transform) for transform in self.transforms],
            "skew": None if self.skew is None else type(self.skew).__name__,
            "mean": _describe_normalization(normalization, "mean"),
            "std": _describe_normalization(normalization, "std"),
        }

    def _apply_skew(self, data: ClientData, after_normalizing: bool) -> ClientData:
        """Apply the skew to each client's inputs, if it belongs to this stage."""
        if self.skew is None or self.skew.after_normalizing != after_normalizing:
            return data
        x, parts = data.inputs.clone(), (data.train, data.val, data.test)
        for client in range(data.num_clients):
            samples = torch.cat([part.samples(client) for part in parts])
            changed = self.skew.change(x[samples], client, data.num_clients, self.seed)
            shape = getattr(changed, "shape", None)
            if shape != x[samples].shape:
                got = type(changed).__name__ if shape is None else list(shape)
                raise ValueError(
                    f"Expected argument `skew` to keep the shape {list(x[samples].shape)} of inputs"
                    f" but got {got} from {type(self.skew).__name__}."
                )
            x[samples] = changed
        return replace(data, inputs=x)

    def _draw_root(self, train: Part, is_held_out: Tensor) -> tuple[Part, Tensor]:
        """Return the clients' training samples without the server's, and the server's samples.

        The server takes none of a held-out client, unless a training client shares it.
        """
        if not self.root_samples:
            return train, train.index[:0]
        trains = ~is_held_out[train.owners()]
        samples = train.index[trains].unique()  # clients may share some
        if self.root_samples >= len(samples):
            raise ValueError(
                f"Expected argument `root_samples` to be below the {len(samples)} training samples"
                f" of all clients{' that train' if is_held_out.any() else ''} but got"
                f" {self.root_samples}."
            )
        draw = torch.randperm(len(samples), generator=generator(self.seed, "root"))
        root = samples[draw[: self.root_samples]]
        remains = ~torch.isin(train.index, root)
        sizes = train.owners()[remains].bincount(minlength=len(train.sizes))
        return Part.from_sizes(train.index[remains], sizes), root

    def _check_training_data(self, split: ClientSplit, sizes: Tensor) -> None:
        arrays, empty = split.arrays, (sizes == 0).nonzero().flatten().tolist()
        if not empty:
            return
        client = f"client {empty[0]}"
        hint = "use fewer clients, smaller fractions or another partitioner"
        if self.partitioner is None and arrays.client is not None:
            owner = arrays.client.unique()[empty[0]]
            client += f" (id {escape_controls(arrays.owner_name(int(owner)))} in the data)"
            hint = "remove such clients from the data, or use smaller fractions"
            official = arrays.split if len(split.official) > 1 else None
            if official is not None and TRAIN not in official[arrays.client == owner]:
                hint = (
                    "set `data.split: own`, or use the partitioner ByOwner, which joins several ids"
                    " into a client"
                )
        if self.root_samples:
            hint += ", or fewer `root_samples`"
        raise ValueError(
            f"Expected every client to have training samples but got none for {len(empty)} of"
            f" {len(sizes)} clients, first for {client}: {hint}."
        )

    def _refuse_changes(self, is_set: Mapping[str, bool], inputs: str) -> None:
        """Raise ``ValueError`` if an argument would change inputs that no argument can change."""
        for name, value in is_set.items():
            if value:
                raise ValueError(
                    f"Expected argument `{name}` to be left out for inputs {inputs} but got"
                    f" {getattr(self, name)}: change the inputs in the data source or in the net."
                )

    def _type_of_changed(self, inputs: Tensor) -> torch.dtype:
        """Return the type of transformed inputs: 64 bits for wide numbers of a run in 64 bits."""
        real = self._real_type()
        if inputs.dtype == torch.float64:
            return real or torch.float64
        is_wide = inputs.dtype in _INTEGERS and inputs.dtype.itemsize > 2
        return torch.float64 if is_wide and real == torch.float64 else torch.float32

    def _transform_inputs(self, arrays: Arrays) -> Tree:
        """Return the transformed inputs in float32, or in float64 for a run in 64 bits.

        Without transforms, normalization and skew, integers that are no images stay integers: they
        may be ids.
        """
        is_set = {
            "transforms": bool(self.transforms),
            "normalize": self.normalize != "none",
            "skew": self.skew is not None,
        }
        if isinstance(arrays.entries, OwnBatches):
            self._refuse_changes({**is_set, "augment": self.augment is not None}, _OWN)
            arrays.entries.size = self._batch_size or (self.dataset.minibatches or _MINIBATCHES)[0]
            return arrays.inputs
        if arrays.redraw is not None:
            drawn = {name: value for name, value in is_set.items() if name != "normalize"}
            inputs = "that are drawn anew, unless `data.dataset.redraw` is false,"
            self._refuse_changes(drawn, inputs)
        if arrays.mapped:
            self._refuse_changes(is_set, "in a memory map, which they would load")
            return arrays.inputs
        if self._real_type() == torch.float32:
            columns = self.dataset.columns or {}
            warn_of_rounding(arrays.inputs, [name for name in columns if not columns[name]])
        if not isinstance(arrays.inputs, Tensor):
            inputs = arrays.inputs
            if is_set.pop("normalize"):  # also images that would stay uint8
                inputs = tree_map(lambda leaf: scale_images(leaf, torch.float32), inputs)
            self._refuse_changes(is_set, f"of several tensors ({describe(arrays.inputs)})")
            return tree_map(partial(_convert, real=self._real_type()), inputs)
        if not any(is_set.values()):
            return _convert(arrays.inputs, self._real_type())
        changed = self._type_of_changed(arrays.inputs)
        x = arrays.inputs.to(changed, copy=bool(self.transforms))  # one may change it in place
        if arrays.inputs.dtype == torch.uint8:
            x /= 255
        return self._apply_transforms(x)

    def _apply_transforms(self, x: Tensor) -> Tensor:
        """Return the inputs of all samples after the transforms; warn if one draws at random."""
        num_samples = len(x)
        with fork_torch_rng(x.device) as seed:
            for position, transform in enumerate(self.transforms):
                seed(key(self.seed, "transforms", position))
                before = torch.get_rng_state()
                x = transform(x)
                if not torch.equal(before, torch.get_rng_state()):
                    rank_zero_warn(
                        f"{type(transform).__name__} of `data.transforms` draws at random, and"
                        " changes all samples once, test samples too: set `data.augment` to change"
                        " each training minibatch."
                    )
                if len(x) != num_samples:
                    raise ValueError(
                        "Expected argument `transforms` to keep the number of samples"
                        f" ({num_samples}) but got {len(x)} from {type(transform).__name__}."
                    )
        return x


def _list_changes(changes: Any) -> list[Any]:
    """Return changes of inputs as a list: a list, one module or function, or ``None``."""
    return [changes] if callable(changes) else changes or []


def _check_stable_cut(stable_cut: object, partitioner: Partitioner | None) -> None:
    """Refuse a stable cut of samples that a partitioner distributes by their labels."""
    check_instances(bool, **{"data.stable_cut": stable_cut})
    if stable_cut and partitioner is not None and partitioner.splits != "owners":
        raise ValueError(
            "Expected argument `data.stable_cut` to be false with a partitioner that splits by"
            " labels, because it gives clients other samples of grown data, but got"
            f" {type(partitioner).__name__}: use data with owners, without a partitioner."
        )


def _check_source(dataset: object, argument: str = "dataset") -> None:
    """Raise ``TypeError`` unless an object is a data source; name the source that reads it."""
    if remedy := _suggest_source(dataset):
        raise TypeError(
            f"Expected argument `{argument}` to be an object of a subclass of DataSource but got"
            f" {type(dataset).__name__}: {remedy}."
        )
    check_instances(DataSource, **{argument: dataset})


def _suggest_source(dataset: object) -> str | None:
    """Return the remedy for data that are no data source: the source that reads them.

    ``None`` if no source of pl_fed does.
    """
    package = type(dataset).__module__.split(".")[0]
    if isinstance(dataset, LightningDataModule):
        return "pass pl_fed.data.LightningData(dataset)"
    if isinstance(dataset, Dataset):
        return "pass pl_fed.data.TorchDataset(dataset)"
    if package == "datasets":
        return "pass pl_fed.data.HuggingFace(dataset)"
    if package in {"pandas", "polars", "pyarrow"}:
        return "write it as a CSV or parquet file, and pass pl_fed.data.Table(path)"
    if isinstance(dataset, Arrays):
        return "pass an object of a subclass of pl_fed.data.DataSource whose `load` returns them"
    if isinstance(dataset, Tensor | list | tuple) or package == "numpy":
        return "pass pl_fed.data.TorchDataset(torch.utils.data.TensorDataset(inputs, targets))"
    return None


def _check_central(central: object) -> None:
    """Refuse anything but ``"official"``, a data source and ``None``."""
    if isinstance(central, str) and central != "official":
        raise ValueError(
            'Expected argument `central` to be "official", a data source or None but got'
            f" {central!r}."
        )
    if central is not None and central != "official":
        _check_source(central, "central")


def _load(source: DataSource) -> Arrays:
    """Return the samples of a data source; refuse anything but ``Arrays``."""
    arrays = source.load()
    if not isinstance(arrays, Arrays):
        raise TypeError(
            f"Expected `load` of {type(source).__name__} to return Arrays but got"
            f" {type(arrays).__name__}."
        )
    if source.columns is None:  # the columns of tables have warnings of their own
        _warn_of_two_forms(arrays)
    return arrays


def _warn_of_two_forms(arrays: Arrays) -> None:
    """Say that owners, classes or groups have names that differ by their form in Unicode only."""
    for kind, names in (
        ("clients", arrays.names),
        ("classes", arrays.class_names),
        ("groups", arrays.group_names),
    ):
        if forms := find_two_forms([str(name) for name in names or ()]):
            rank_zero_warn(
                f"pl_fed takes {forms[0]!a} and {forms[1]!a} for two {kind}, because their"
                " letters have two forms in Unicode: write all names by"
                " unicodedata.normalize('NFC', name)."
            )


def _convert(leaf: Tensor, real: torch.dtype | None) -> Tensor:
    """Convert real numbers to float32 and uint8 images to [0, 1]; keep other integers.

    Real numbers of 64 bits become ``real``, or stay for ``None``. Unsigned integers that float32
    would round become int64, as torch lacks functions of them. Images larger than 1 GiB in float32
    stay uint8; each minibatch converts its own.
    """
    if leaf.dtype == torch.uint8:
        return leaf if 4 * leaf.nbytes > _LARGE else scale_images(leaf, torch.float32)
    if leaf.dtype in _UNSIGNED:
        return leaf.to(torch.int64)
    if leaf.dtype in _INTEGERS:
        return leaf
    return leaf.to((real or torch.float64) if leaf.dtype == torch.float64 else torch.float32)


def _normalize(leaf: Tensor, normalization: Normalization | None) -> Tensor:
    return leaf if normalization is None else normalization(leaf)


def _redraw_inputs(
    redraw: Redraw, normalization: Tree, positions: list[int], keys: list[int]
) -> tuple[Tree, Tree]:
    """Return samples that are drawn anew, with normalized inputs."""
    inputs, targets = redraw(positions, keys)

    def prepare(leaf: Tensor, normalization: Normalization | None) -> Tensor:
        if normalization is None:
            return leaf
        return normalization(scale_images(leaf, torch.float32).to(normalization.mean.dtype))

    return tree_map(prepare, inputs, normalization), targets


def _describe_normalization(normalization: Tree, name: str) -> Any:
    """Return the means or standard deviations of each tensor; ``None`` without normalization."""
    if isinstance(normalization, Normalization):
        return getattr(normalization, name)[0].tolist()
    if isinstance(normalization, dict):
        described = {k: _describe_normalization(v, name) for k, v in normalization.items()}
        return described if any(value is not None for value in described.values()) else None
    if isinstance(normalization, tuple | list):
        values = [_describe_normalization(branch, name) for branch in normalization]
        return values if any(value is not None for value in values) else None
    return None


class ClientBatches:
    """Batches of client ids, in place of a DataLoader, which would load single samples.

    Args:
        clients: Client ids.
        size: Number of ids in a batch.

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
    """Return the seed set by Lightning's ``seed_everything``, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED") or 0)
