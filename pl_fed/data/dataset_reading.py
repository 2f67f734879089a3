"""Reading of a map-style data set into tensors."""

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, default_collate

from pl_fed.data.batch_roles import BatchRoles, MissingRowsError, UnstackableError
from pl_fed.data.collation import PaddingCollation
from pl_fed.data.collation_trial import mixes_samples
from pl_fed.data.memory_map import allocate_in_memory, allocate_on_disk
from pl_fed.data.own_reading import read_own_batches
from pl_fed.data.reading_options import ReadingOptions
from pl_fed.data.redraw import (
    Redraw,
    choose_redraw,
    explain_errors,
    name_of,
    spaced_positions,
)
from pl_fed.data.sample_owners import list_parts, number_sample_owners, read_labels
from pl_fed.data.sample_reader import Collate, SampleReader, Samples
from pl_fed.data.sample_structure import align, paths_of
from pl_fed.data.source import Arrays, count_classes
from pl_fed.random import fork_all_generators
from pl_fed.tasks.own_batches import LEFT_OUT
from pl_fed.trees import Tree, leaves, tree_map

Allocate = Callable[[int, Tensor], Tensor]
_DEFAULTS = ReadingOptions()
_CHUNK = 256  # samples that are collated at once
_MIXED = (
    "Expected argument `collate_fn` to make each row of a batch of one sample, in the order of the"
    " samples, but got rows that depend on the other samples of their batch: leave such changes to"
    " a LightningModule's `training_step`, or let a LightningModule be the net, whose steps get the"
    " batches unchanged"
)
_FIRST = 2  # samples that are tried before workers start


def read_data_sets(
    data_sets: Mapping[int, Any],
    roles: BatchRoles,
    collate_fn: Collate | None = None,
    num_classes: int | None = None,
    options: ReadingOptions = _DEFAULTS,
    collates: Mapping[int, Collate] | None = None,
) -> Arrays:
    """Return the samples of data sets, one data set after another.

    If ``collate_fn`` does not join samples into tensors with a row for each, minibatches are those
    that it makes, unchanged: see :class:`~pl_fed.tasks.OwnBatches`.

    Args:
        data_sets: Map-style data sets by their official part. A single one has no official part.
        roles: The use of the entries of a sample.
        collate_fn: Joins samples into a batch; ``None`` for torch's ``default_collate``.
        num_classes: Number of classes; ``None`` uses the largest class id + 1.
        options: How the samples are read and stored.
        collates: The function of each official part, if they differ: only own batches take them.

    Raises:
        TypeError: If a data set is not map-style.
        ValueError: If a sample cannot be read, or samples do not fit together.
    """
    pieces = list(data_sets.values())
    for piece in pieces:
        _check_map_style(piece)
    collates = collates or dict.fromkeys(data_sets, collate_fn or default_collate)
    if options.own:
        return read_own_batches(data_sets, roles, collates, options)
    try:
        return _read_tensors(data_sets, roles, collate_fn, num_classes, options)
    except ValueError as error:
        if collate_fn is None or not isinstance(error.__cause__, UnstackableError):
            raise
        if isinstance(error.__cause__, MissingRowsError):
            name = " and ".join(dict.fromkeys(map(name_of, pieces)))
            rank_zero_warn(f"Batches of {name} have fewer rows than samples. {LEFT_OUT}")
        return read_own_batches(data_sets, roles, collates, options, reason=str(error))


def find_no_tensors(dataset: Any, roles: BatchRoles, collate_fn: Collate) -> bool:
    """Return whether a collate function makes no tensors with a row for each of a few samples."""
    with fork_all_generators() as seed:
        seed(0)
        try:
            SampleReader(roles, collate_fn)([dataset[k] for k in range(min(_FIRST, len(dataset)))])
        except UnstackableError:
            return True
        except Exception:  # it comes again, with a sentence, when all samples are read
            return False
    return False


def _read_tensors(
    data_sets: Mapping[int, Any],
    roles: BatchRoles,
    collate_fn: Collate | None,
    num_classes: int | None,
    options: ReadingOptions,
) -> Arrays:
    """Return all samples as tensors."""
    pieces = list(data_sets.values())
    dataset = pieces[0] if len(pieces) == 1 else ConcatDataset(pieces)
    name = " and ".join(dict.fromkeys(map(name_of, pieces)))
    reader = SampleReader(roles, collate_fn or default_collate)
    allocate = allocate_on_disk if options.on_disk else allocate_in_memory
    with fork_all_generators() as seed, explain_errors(name):
        seed(0)
        if collate_fn is not None and not reader.pads and mixes_samples(dataset, reader, seed):
            raise UnstackableError(_MIXED)
        seed(0)  # the draws of a data set are the same in every run and process
        samples, reader = _read_all(dataset, reader, options.num_workers, allocate, seed)
        redraw, draws = choose_redraw(dataset, pieces, reader, samples, options.redraw)
        _warn_of_padded_targets(dataset, reader)
    samples, class_names, class_ids = _match_class_names(pieces, samples)
    client, names = number_sample_owners(dataset, samples.owners, roles)
    classes = num_classes
    if classes is None and class_names is not None:
        classes = len(class_names)
    elif classes is None:
        is_flat = isinstance(samples.targets, Tensor) and samples.targets.dim() == 1
        classes = count_classes(samples.targets) if is_flat else 0
    inputs, targets, labels = samples.inputs, samples.targets, samples.labels
    if options.labels is not None:
        labels = read_labels(dataset, options.labels)
    return Arrays(
        inputs,
        targets,
        client,
        list_parts(data_sets),
        classes,
        names,
        labels,
        options.on_disk,
        partial(_redraw_renumbered, redraw, class_ids) if redraw and class_ids else redraw,
        samples.entries,
        class_names or () if len(class_names or ()) == classes else (),
        ordered_draws=draws,
    )


def _warn_of_padded_targets(dataset: Any, reader: SampleReader) -> None:
    """Say that one number pads inputs and integer targets, where it may be a class or a token."""
    collate = reader.collate
    if not isinstance(collate, PaddingCollation) or isinstance(collate.padding, Mapping):
        return
    if collate.padding < 0:
        return
    unpadded = SampleReader(reader.roles, PaddingCollation(collate.padding))
    shapes: set[tuple[torch.Size, ...]] = set()
    for position in spaced_positions(len(dataset)):
        targets = leaves(unpadded([dataset[position]], position).targets)
        shapes.add(tuple(leaf.shape for leaf in targets if not leaf.is_floating_point()))
    if len(shapes) > 1:
        rank_zero_warn(
            f"pl_fed pads the targets of {name_of(dataset)} by {collate.padding:g}, as the inputs,"
            " and they count as a class or a token unless the loss ignores this number: name the"
            " padding of each entry, for example {input_ids: 0, labels: -100}."
        )


@dataclass(frozen=True)
class _ClassIds:
    """The class ids of parts that number their classes by themselves.

    Attributes:
        begins: The position of the first sample of each part.
        ids: For each part, the id of a class over all parts by its id in the part.
    """

    begins: Sequence[int]
    ids: Sequence[Mapping[int, int]]

    def renumber(self, targets: Tensor, positions: Sequence[int]) -> Tensor:
        """Return the class ids over all parts of the samples at some positions."""
        parts = [bisect.bisect_right(self.begins, position) - 1 for position in positions]
        ids = [self.ids[part].get(id, id) for part, id in zip(parts, targets.tolist(), strict=True)]
        return torch.tensor(ids, dtype=targets.dtype)


def _redraw_renumbered(
    redraw: Redraw, class_ids: _ClassIds, positions: list[int], keys: list[int]
) -> tuple[Tree, Tree]:
    """Return samples that are drawn anew, with the class ids over all parts."""
    inputs, targets = redraw(positions, keys)
    return inputs, class_ids.renumber(targets, positions)


def _match_class_names(
    pieces: Sequence[Any], samples: Samples
) -> tuple[Samples, list[str] | None, _ClassIds | None]:
    """Return samples whose class ids mean the same class in all parts, and the classes' names.

    Parts with a ``class_to_idx``, such as image folders of torchvision, number their own folders.
    The classes of the training part keep their ids. The names are ``None`` if a part has none. The
    third result has the new ids; it is ``None`` if all ids stay.
    """
    tables = [_class_ids(piece) for piece in pieces]
    is_flat = isinstance(samples.targets, Tensor) and samples.targets.dim() == 1
    if not is_flat or samples.targets.is_floating_point() or None in tables:
        return samples, None, None
    pairs = [sorted((id, name) for name, id in (table or {}).items()) for table in tables]
    names = [*dict.fromkeys(name for table in pairs for _, name in table)]
    if all(table == tables[0] for table in tables):
        return samples, names, None
    begins = [0, *accumulate(map(len, pieces))][: len(pieces)]
    class_ids = _ClassIds(begins, [{id: names.index(name) for id, name in pair} for pair in pairs])
    targets = class_ids.renumber(samples.targets, range(len(samples.targets)))
    return replace(samples, targets=targets), names, class_ids


def _class_ids(dataset: Any) -> dict[str, int] | None:
    """Return the class id by name of a data set, also below a subset; ``None`` without names.

    The names are not those of ids that a ``target_transform`` of torchvision makes.
    """
    if getattr(dataset, "target_transform", None) is not None:
        return None
    table = getattr(dataset, "class_to_idx", None)
    if isinstance(table, Mapping) and [*sorted(table.values())] == [*range(len(table))]:
        return dict(table)
    return _class_ids(dataset.dataset) if isinstance(dataset, Subset) else None


def _read_all(
    dataset: Any,
    reader: SampleReader,
    num_workers: int,
    allocate: Allocate,
    seed: Callable[[int], None],
) -> tuple[Samples, SampleReader]:
    """Return all samples, and a reader that pads other samples to the same lengths."""
    if num_workers and len(dataset):  # an error in a worker takes seconds
        reader([dataset[position] for position in range(min(_FIRST, len(dataset)))])
        seed(0)
    try:
        samples = _read_chunks(dataset, reader, _CHUNK, num_workers, allocate)
    except _UnequalShapesError:  # padded to the longest sample of a chunk
        seed(0)
        if reader.pads:
            reader = _lengthen(dataset, reader)
            seed(0)
        size = _CHUNK if reader.pads else len(dataset)
        samples = _read_chunks(dataset, reader, size, 0, allocate)
    return samples, reader.lengthen(samples.empty_batch)


def _lengthen(dataset: Any, reader: SampleReader) -> SampleReader:
    """Return a reader that pads to the longest of all samples."""
    for begin in range(0, len(dataset), _CHUNK):
        chunk = [dataset[k] for k in range(begin, min(begin + _CHUNK, len(dataset)))]
        reader = reader.lengthen(reader(chunk).empty_batch)
    return reader


def _read_chunks(
    dataset: Any, reader: SampleReader, size: int, num_workers: int, allocate: Allocate
) -> Samples:
    """Return all samples, read in chunks into tensors that are made once."""
    loader: DataLoader[Any] = DataLoader(
        cast(Any, _Numbered(dataset)),
        size,
        collate_fn=partial(_collate_numbered, reader),
        num_workers=num_workers,
        generator=torch.Generator().manual_seed(0),
    )
    store: Samples | None = None
    owners: list[Any] | None = []
    done = 0
    for chunk in loader:
        if store is None:
            in_memory = partial(allocate_in_memory, len(dataset))
            store = Samples(
                tree_map(partial(allocate, len(dataset)), chunk.inputs),
                tree_map(in_memory, chunk.targets),
                tree_map(in_memory, chunk.labels),
                None,
                chunk.empty_batch,
                chunk.entries,
            )
        place = f"sample {done}"
        for path, rows, leaf in _match_tensors(store, chunk, place):
            if rows.dtype != leaf.dtype:
                raise ValueError(
                    f"Expected all samples to be of one type but got {rows.dtype} and {leaf.dtype}"
                    f"{f' in entry {path!r}' if path else ''}, first in {place}, or soon after it."
                )
            if rows.shape[1:] != leaf.shape[1:]:
                raise _UnequalShapesError
            rows[done : done + len(leaf)] = leaf
        owners = None if owners is None or chunk.owners is None else [*owners, *chunk.owners]
        done += len(chunk.leaves[0])
    if store is None:
        raise ValueError("Expected at least one sample but got none.")
    return replace(store, owners=owners)


def _match_tensors(
    store: Samples, chunk: Samples, place: str
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the path of each tensor, its rows of all samples, and those of a chunk."""
    expected, tree = store.by_name, chunk.by_name
    tensors = leaves(align(tree, expected, place))
    yield from zip(paths_of(expected), leaves(expected), tensors, strict=True)


class _Numbered:
    """A data set whose samples come with their positions, so that errors can name them."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[int, Any]]:
        """Return several samples, at once if the data set can; a DataLoader calls it."""
        if hasattr(self.dataset, "__getitems__"):
            return list(zip(indices, self.dataset.__getitems__(indices)))
        return [(index, self.dataset[index]) for index in indices]


def _collate_numbered(reader: SampleReader, samples: list[tuple[int, Any]]) -> Samples:
    return reader([sample for _, sample in samples], samples[0][0])


class _UnequalShapesError(Exception):
    """The samples of one chunk are padded to another length than those of another."""


def _check_map_style(dataset: Any) -> None:
    is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not is_map:
        raise TypeError(
            "Expected argument `dataset` to be a map-style data set, with `__getitem__` and"
            f" `__len__`, but got {name_of(dataset)}: read its samples into a list first."
        )
