"""Your own data from a ``LightningDataModule``."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)

from pl_fed.arguments import check_choice, check_instances, check_integers
from pl_fed.data.dataset_reading import find_no_tensors, read_data_sets
from pl_fed.data.module import global_seed
from pl_fed.data.reading_options import ReadingOptions
from pl_fed.data.source import TEST, TRAIN, VAL, Arrays, DataSource
from pl_fed.data.torch_dataset import build_roles, choose_collation
from pl_fed.random import fork_all_generators
from pl_fed.tasks.module_steps import BATCH_HOOKS
from pl_fed.tasks.own_batches import Collate, OwnBatches
from pl_fed.text import find_code_line, first_line

_HOOKS = {TRAIN: "train_dataloader", VAL: "val_dataloader", TEST: "test_dataloader"}
_EVALUATED = {VAL: "val", TEST: "test"}


class LightningData(DataSource):
    """Lightning data: the data sets in the dataloaders of a ``LightningDataModule``.

    The data sets of ``train_dataloader``, ``val_dataloader`` and ``test_dataloader`` are the
    official parts. A random split in ``setup`` depends on Lightning's global seed alone, and is the
    same in each call. Each sample is read once, and joined by the dataloaders' ``collate_fn``. The
    federation draws its own minibatches, of the batch size and ``drop_last`` of the training
    dataloader, unless ``data.batch_size`` and ``data.drop_last`` are set. Evaluation steps get
    batches of the size of the part's own dataloader.
    A training data set that draws at random is read again for each minibatch, as by
    :class:`~pl_fed.data.TorchDataset`.

    Args:
        datamodule: The data module. pl_fed calls its ``prepare_data`` and ``setup``.
        client: The owner of each sample, an integer or a text: the key or position of an entry of
            the sample, the name of an attribute of the data sets with one owner per sample, or a
            list of the owners of all training, validation and test samples. ``None`` if samples
            have no owners, so that a partitioner is needed.
        client_fn: A function that returns the owner of a sample, instead of ``client``.
        inputs: The keys or positions of the inputs. ``None`` uses all entries besides client and
            target.
        target: The key or position of the target. ``None`` uses the last entry of a tuple, or the
            entry called labels, label, targets, target or y of a dict.
        labels: The key or position of the class of each sample, for partitioners, where the target
            is not a class id. ``None`` uses the target.
        padding: The number that pads shorter samples to the longest one, for all entries or by the
            key of an entry; for dataloaders without a ``collate_fn``.
        num_classes: Number of classes. ``None`` uses the largest class id + 1.
        num_workers: Number of processes that read, ahead of the steps for own batches; 0 for the
            main one. ``None`` takes that of the training dataloader for own batches, otherwise 0.
        redraw: Whether each training minibatch reads its samples again, so that random augmentation
            is drawn anew. ``None`` reads some samples twice, and draws anew if they differ.
        on_disk: Whether inputs are stored in a temporary file in ``TMPDIR`` and read from there,
            because they are larger than memory.
        batches: ``"own"`` gives the steps of a LightningModule the batches of the dataloaders'
            ``collate_fn`` unchanged, as by :class:`~pl_fed.data.TorchDataset`.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If an argument is out of range.

    Example:
        >>> class Digits(LightningDataModule):
        ...     def train_dataloader(self):
        ...         return DataLoader([(0.5, 1), (1.5, 0)], batch_size=2)
        ...     def test_dataloader(self):
        ...         return DataLoader([(2.5, 1)])
        >>> arrays = LightningData(Digits()).load()
        >>> arrays.inputs.tolist(), arrays.targets.tolist(), arrays.split.tolist()
        ([0.5, 1.5, 2.5], [1, 0, 1], [0, 0, 2])
    """

    def __init__(
        self,
        datamodule: LightningDataModule,
        client: int | str | list[int] | list[str] | None = None,
        client_fn: Callable[[Any], Any] | None = None,
        inputs: list[str] | list[int] | None = None,
        target: int | str | None = None,
        labels: int | str | None = None,
        padding: float | dict[str, float] | None = None,
        num_classes: int | None = None,
        num_workers: int | None = None,
        redraw: bool | None = None,
        on_disk: bool = False,
        batches: Literal["own"] | None = None,
    ) -> None:
        if batches is not None:
            check_choice(("own",), batches=batches)
        check_instances(LightningDataModule, datamodule=datamodule)
        if num_classes is not None:
            check_integers(0, num_classes=num_classes)
        if num_workers is not None:
            check_integers(0, num_workers=num_workers)
        choose_collation(None, padding)
        self.datamodule = datamodule
        self.roles = build_roles(client, client_fn, inputs, target, labels)
        self.padding = padding
        self.num_classes = num_classes
        self.num_workers = num_workers
        self.options = ReadingOptions(redraw, on_disk, num_workers or 0, batches == "own")

    @property
    def name(self) -> str:
        """The class of the data module, for messages."""
        return type(self.datamodule).__name__

    def load(self) -> Arrays:
        """Return all samples, read once.

        Raises:
            TypeError: If a hook returns another object than a DataLoader of a map-style data set.
            ValueError: If a hook fails without a Trainer, there is no training data, dataloaders
                join samples in different ways, or samples do not fit together.
        """
        with self._explain_errors("prepare_data"):
            self.datamodule.prepare_data()
        loaders = self._build_loaders()
        if TRAIN not in loaders:
            raise ValueError(
                f"Expected argument `datamodule` to have a `train_dataloader` but got {self.name}"
                " without one."
            )
        self.minibatches = _find_minibatches(loaders[TRAIN])
        self.evaluation_sizes = {}
        for part in _EVALUATED.keys() & loaders.keys():
            if (minibatches := _find_minibatches(loaders[part])) is not None:
                self.evaluation_sizes[_EVALUATED[part]], drops_last = minibatches
                if drops_last:
                    rank_zero_info(
                        f"pl_fed evaluates all samples of `{_HOOKS[part]}` of {self.name}, although"
                        " its dataloader has drop_last=True, which would leave out other samples of"
                        " each client."
                    )
        data_sets = {part: self._select(loader) for part, loader in loaders.items()}
        if _count_shared(data_sets):
            loaders = self._build_loaders(repeats=True)
            data_sets = {part: self._select(loader) for part, loader in loaders.items()}
            self._report_shared(data_sets)
        self._warn_of_samplers(loaders)
        collates = {part: loader.collate_fn for part, loader in loaders.items()}
        self._check_collation(collates, data_sets[TRAIN])
        first = collates[TRAIN]
        collate_fn = choose_collation(None if first is default_collate else first, self.padding)
        if collate_fn is not None and self.padding is not None:
            collates = dict.fromkeys(collates, collate_fn)
        arrays = read_data_sets(
            data_sets, self.roles, collate_fn, self.num_classes, self.options, collates
        )
        if isinstance(arrays.entries, OwnBatches):
            arrays.entries.datamodule = self.datamodule
            if self.num_workers is None:
                arrays.entries.set_workers(loaders[TRAIN].num_workers)
        else:
            self._warn_of_batch_hooks()
        return arrays

    def _build_loaders(self, repeats: bool = False) -> dict[int, Any]:
        """Return the dataloaders of the parts that the data module has.

        The global generators are seeded as by Lightning's ``seed_everything``: a random split
        without a generator depends on the seed alone, and not on the draws of a net.

        Args:
            repeats: Whether all hooks make the same draws, so that all draw the same split.
        """
        loaders: dict[int, Any] = {}
        stages = {TRAIN: "fit", TEST: "test"}
        with fork_all_generators() as seed:
            seed(global_seed())
            for part, hook in _HOOKS.items():
                if part in stages:
                    if repeats:
                        seed(global_seed())
                    with self._explain_errors("setup"):
                        self.datamodule.setup(stages[part])
                if is_overridden(hook, self.datamodule):
                    if repeats:
                        seed(global_seed())
                    loader = self._build_loader(hook)
                    if loader is not None:
                        loaders[part] = loader
        return loaders

    def _build_loader(self, hook: str) -> Any:
        """Return the dataloader of a hook; ``None`` if it returns none, or an empty list."""
        with self._explain_errors(hook):
            loader = getattr(self.datamodule, hook)()
        if isinstance(loader, list | tuple) and len(loader) < 2:
            loader = loader[0] if loader else None
        if loader is not None:
            self._check_loader(hook, loader)
        return loader

    def _report_shared(self, data_sets: Mapping[int, Any]) -> None:
        """Say that training samples are in other parts, or that only repeated draws prevent it."""
        shared = _count_shared(data_sets)
        if not shared:
            rank_zero_info(
                f"{self.name} draws another split in each hook, so that training samples would be"
                " test samples: pl_fed lets all hooks make the same draws."
            )
        for part, number in shared.items():
            name = {VAL: "validation", TEST: "test"}[part]
            rank_zero_warn(
                f"{number} of {len(data_sets[part])} {name} samples of {self.name} are training"
                " samples, too: give the parts other samples."
            )

    def _check_loader(self, hook: str, loader: object) -> None:
        if not isinstance(loader, DataLoader):
            raise TypeError(
                f"Expected `{hook}` of {self.name} to return one DataLoader but got"
                f" {type(loader).__name__}: join the data sets by ConcatDataset."
            )
        if loader.batch_size is None and loader.batch_sampler is None:
            raise TypeError(
                f"Expected `{hook}` of {self.name} to return a DataLoader of single samples but got"
                " one with batch_size=None, whose data set makes batches: set a batch size."
            )

    def _check_collation(self, collates: Mapping[int, Collate], dataset: Any) -> None:
        """Refuse several collate functions, unless batches are own."""
        first = collates[TRAIN]
        for part, collate in collates.items():
            if collate == first or self.options.own or find_no_tensors(dataset, self.roles, first):
                continue
            raise ValueError(
                f"Expected all dataloaders of {self.name} to have one `collate_fn` but"
                f" `{_HOOKS[part]}` has another than `{_HOOKS[TRAIN]}`: give them the same, and"
                " set `data.augment` for changes of training batches, or set"
                " `data.dataset.batches: own`."
            )

    def _select(self, loader: Any) -> Any:
        """Return the data set of a loader, or the samples that its sampler selects."""
        sampler = _find_sampler(loader)
        if isinstance(sampler, SubsetRandomSampler):
            return Subset(loader.dataset, [int(index) for index in sampler.indices])
        return loader.dataset

    def _warn_of_samplers(self, loaders: Mapping[int, Any]) -> None:
        """Warn of samplers that do not visit each sample once, as pl_fed does."""
        batches = loaders[TRAIN].batch_sampler
        is_ordered = type(batches) is BatchSampler and type(batches.sampler) is SequentialSampler
        if is_ordered and len(batches) > 1:
            rank_zero_info(
                f"pl_fed shuffles the training samples of {self.name} in each pass, although its"
                " `train_dataloader` does not."
            )
        for part, loader in loaders.items():
            sampler = _find_sampler(loader)
            usual = isinstance(sampler, DistributedSampler | SubsetRandomSampler)
            if isinstance(sampler, RandomSampler | SequentialSampler):
                repeats = getattr(sampler, "replacement", False)
                usual = not repeats and len(sampler) == len(loader.dataset)
            if not usual or type(loader.batch_sampler) is not BatchSampler:
                other = loader.batch_sampler if usual else sampler
                is_shorter = not usual and _length_of(sampler) < _length_of(loader.dataset)
                remedy = " To leave samples out, give the dataloader a torch.utils.data.Subset."
                rank_zero_warn(
                    f"pl_fed ignores the sampler {type(other).__name__} of `{_HOOKS[part]}` of"
                    f" {self.name}: a pass over a client's data visits each sample once."
                    f"{remedy if is_shorter else ''}"
                )

    def _warn_of_batch_hooks(self) -> None:
        for hook in BATCH_HOOKS:
            if is_overridden(hook, self.datamodule):
                rank_zero_warn(
                    f"pl_fed does not call `{hook}` of {self.name}: change samples in the data set,"
                    " set `data.augment` for changes of training batches, or set"
                    " `data.dataset.batches: own`."
                )

    @contextmanager
    def _explain_errors(self, hook: str) -> Iterator[None]:
        """Replace any error of a hook by one sentence."""
        try:
            yield
        except Exception as error:  # of any type
            remedy = "read `self.trainer` only if it is set, or give `__init__` what it tells"
            raise ValueError(
                f"Expected `{hook}` of {self.name} to run without a Trainer but got"
                f" {type(error).__name__}: {first_line(error)}"
                f"{f': {remedy}' if 'trainer' in find_code_line(error) else ''}."
            ) from error


def _find_sampler(loader: Any) -> Any:
    """Return the sampler of a dataloader, or of its own batch sampler."""
    batches = loader.batch_sampler
    return batches.sampler if type(batches) is BatchSampler else loader.sampler


def _length_of(samples: Any) -> float:
    """Return the length of a sampler or data set; infinity if it has none."""
    return len(samples) if hasattr(samples, "__len__") else np.inf


def _find_minibatches(loader: Any) -> tuple[int, bool] | None:
    """Return the batch size of a dataloader and whether it drops the last batch, if it has one."""
    source = loader if loader.batch_size is not None else loader.batch_sampler
    size, drops = getattr(source, "batch_size", None), getattr(source, "drop_last", False)
    return (size, bool(drops)) if isinstance(size, int) and size > 0 else None


def _count_shared(data_sets: Mapping[int, Any]) -> dict[int, int]:
    """Return the number of training samples in each other part that has some."""
    starts: dict[int, int] = {}
    ids = {part: _number_samples(data_set, starts) for part, data_set in data_sets.items()}
    counts = {part: int(np.isin(ids[part], ids[TRAIN]).sum()) for part in ids if part != TRAIN}
    return {part: count for part, count in counts.items() if count}


def _number_samples(dataset: Any, starts: dict[int, int]) -> "np.ndarray[Any, Any]":
    """Return a number for each sample of a data set, also below subsets; equal for the same sample.

    Args:
        dataset: The data set.
        starts: The first number of each data set without parts, by its id; new ones are added.
    """
    if isinstance(dataset, Subset):
        return _number_samples(dataset.dataset, starts)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_number_samples(piece, starts) for piece in dataset.datasets])
    start = starts.setdefault(id(dataset), len(starts) << 40)
    return np.arange(len(dataset) if hasattr(dataset, "__len__") else 0) + start
