"""Your own data from a Hugging Face ``datasets.Dataset``, in memory or on disk."""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pl_fed.arguments import check_integers
from pl_fed.data.batch_roles import BatchRoles
from pl_fed.data.columns import INDEX_NAMES, PARTS, is_row_number, warn_of_row_numbers
from pl_fed.data.dataset_reading import read_data_sets
from pl_fed.data.reading_options import ReadingOptions
from pl_fed.data.source import TRAIN, Arrays, DataSource
from pl_fed.data.torch_dataset import build_roles, choose_collation
from pl_fed.text import first_line


class HuggingFace(DataSource):
    """Hugging Face data: a ``datasets.Dataset``, or a ``DatasetDict`` with official parts.

    Columns keep their types: uint8 stays uint8, and ids stay integers; other integers of 8 or 16
    bits, as of a tokenized data set, become int32. Inputs are a dict of columns, and the net is
    called as ``net(input_ids=..., attention_mask=...)``; a single column is the tensor itself.
    Tokenize texts before, by ``dataset.map``. Of a ``DatasetDict``, ``train``, ``validation`` and
    ``test`` are the official parts.

    Needs the package datasets: ``pip install pl_fed[hf]``.

    Args:
        dataset: The data set, or the folder of ``dataset.save_to_disk``.
        client: The column of the owner of each sample: integers, text or a ``ClassLabel``. No
            partitioner is needed then.
        inputs: The columns of the inputs. ``None`` uses all columns besides client and target, but
            no text.
        target: The column of the targets. ``None`` uses the one that is called labels, label,
            targets, target or y.
        labels: The column of the class of each sample, for partitioners, where the target is not a
            class id. ``None`` uses the target.
        padding: The number that pads shorter samples to the longest one, for all columns or by
            name, for example ``{"input_ids": 0, "attention_mask": 0}``.
        num_classes: Number of classes. ``None`` uses the classes of a ``ClassLabel``, or the
            largest class id + 1.
        on_disk: Whether inputs are copied into a temporary file in ``TMPDIR`` and read from there,
            because they are larger than memory.
        splits: The part (train, val or test) of each data set of a ``DatasetDict`` by its name, for
            example ``{"train": "train", "validation_matched": "val"}``; others are left out.
            ``None`` takes train, validation and test, and warns of others.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If an argument is out of range.

    Example:
        >>> import pytest
        >>> datasets = pytest.importorskip("datasets")
        >>> columns = {"ids": [[5, 6], [7]], "label": [1, 0], "user": ["b", "a"]}
        >>> source = HuggingFace(datasets.Dataset.from_dict(columns), client="user", padding=0)
        >>> arrays = source.load()
        >>> arrays.inputs.tolist(), arrays.targets.tolist(), arrays.names
        ([[5, 6], [7, 0]], [1, 0], ['a', 'b'])
    """

    def __init__(
        self,
        dataset: Any,
        client: str | None = None,
        inputs: list[str] | None = None,
        target: str | None = None,
        labels: str | None = None,
        padding: float | dict[str, float] | None = None,
        num_classes: int | None = None,
        on_disk: bool = False,
        splits: dict[str, str] | None = None,
    ) -> None:
        is_folder = isinstance(dataset, str | Path)
        if not is_folder and not hasattr(dataset, "with_format"):
            raise TypeError(
                "Expected argument `dataset` to be a datasets.Dataset, a DatasetDict or their"
                f" folder but got {dataset!r}."
            )
        if num_classes is not None:
            check_integers(0, num_classes=num_classes)
        self.dataset = dataset
        self.splits = splits
        self.roles = build_roles(client, None, inputs, target, labels)
        self.collate_fn = choose_collation(None, padding)
        self.num_classes = num_classes
        self.options = ReadingOptions(redraw=False, on_disk=on_disk)

    def load(self) -> Arrays:
        """Return all samples.

        Raises:
            FileNotFoundError: If there is no data set in the folder.
            ModuleNotFoundError: If the package datasets is not installed.
            TypeError: If the data set is streamed, or has a transform of its own.
            ValueError: If a column is missing, holds text, or holds samples of several lengths
                without ``padding``.
        """
        datasets = _import_datasets()
        loaded = self._load_from_disk(datasets) if isinstance(self.dataset, str | Path) else None
        dataset = self.dataset if loaded is None else loaded
        pieces = [(TRAIN, dataset)]
        if isinstance(dataset, datasets.DatasetDict):
            pieces = [(PARTS[part], dataset[name]) for name, part in self._parts(dataset).items()]
        elif self.splits is not None:
            raise ValueError(
                "Expected argument `splits` to be left out for a single data set but got"
                f" {self.splits!r}."
            )
        for _, piece in pieces:
            _check_plain(datasets, piece)
        arrays = self._read([piece for _, piece in pieces])
        parts = torch.tensor([part for part, _ in pieces])
        sizes = torch.tensor([len(piece) for _, piece in pieces])
        if len(pieces) > 1:
            arrays = replace(arrays, split=parts.repeat_interleave(sizes))
        return arrays

    def _parts(self, dataset: Any) -> dict[str, str]:
        """Return the part of each data set of a ``DatasetDict`` by its name."""
        splits = self.splits
        if splits is None:
            splits = {name: name for name in dataset if name in PARTS}
            others = [name for name in dataset if name not in PARTS]
            if not splits:
                raise ValueError(
                    "Expected argument `dataset` to hold train, validation or test but got"
                    f" {', '.join(dataset) or 'nothing'}: name the parts by"
                    " `data.dataset.splits`, or pass one of its data sets."
                )
            if others:
                rank_zero_warn(
                    f"pl_fed leaves out the parts {', '.join(others)} of the data set: set"
                    " `data.dataset.splits` to the part of each, for example"
                    f" {{train: train, {others[0]}: val}}, or to those in use, to confirm this."
                )
        for name, part in splits.items():
            if name not in dataset or part not in PARTS:
                raise ValueError(
                    "Expected argument `splits` to map names of data sets"
                    f" ({', '.join(dataset)}) to train, val or test but got {name!r}: {part!r}."
                )
        return dict(splits)

    def _load_from_disk(self, datasets: Any) -> Any:
        folder = Path(self.dataset).expanduser()
        try:
            return datasets.load_from_disk(folder)
        except Exception as error:  # of any type, by a missing or broken file
            raise FileNotFoundError(
                "Expected argument `dataset` to be a folder written by `dataset.save_to_disk` but"
                f" got {folder.absolute()} ({first_line(error)}): set `data.dataset.dataset`."
            ) from error

    def _read(self, pieces: Sequence[Any]) -> Arrays:
        roles = self._find_columns(pieces[0])
        optional = [name for name in (roles.client, roles.labels) if name is not None]
        columns = [*dict.fromkeys([*(roles.inputs or ()), roles.target, *optional])]
        for piece in pieces[1:]:
            _check_columns(piece, pieces[0], columns)
        names = {name: _join_class_names(pieces, name) for name in columns}
        rows = _JoinedRows([_Rows(piece, columns, names) for piece in pieces])
        classes = self.num_classes
        if classes is None and names[roles.target] is not None:
            classes = len(names[roles.target] or ())
        self.preparation = f"inputs: {', '.join(map(str, roles.inputs or ()))}"
        for piece in pieces:
            _check_labels(piece, roles.target)
        arrays = read_data_sets({TRAIN: rows}, roles, self.collate_fn, classes, self.options)
        owner_names = names.get(roles.client)
        if owner_names and arrays.client is not None and bool((arrays.client >= 0).all()):
            arrays = replace(arrays, names=owner_names)  # -1 has no name
        class_names = names[roles.target] or ()
        if len(class_names) != arrays.num_classes:
            return arrays
        return replace(arrays, class_names=class_names)

    def _find_columns(self, dataset: Any) -> BatchRoles:
        """Return the roles with the names of all columns that are used."""
        columns, client = dataset.column_names, self.roles.client
        selected = [name for name in columns if name in _list_selected(dataset)]
        target = self.roles.find_target([name for name in selected if name != client])
        labels = self.roles.labels
        others = [name for name in selected if name not in (client, target, labels)]
        texts = {name for name in columns if _type_of(dataset.features[name]) in _TEXTS}
        inputs = self.roles.inputs
        if inputs is None:
            inputs = [name for name in others if name not in texts]
            dropped = [str(name) for name in inputs if _holds_row_numbers(dataset, str(name))]
            warn_of_row_numbers(dropped, "the data set")
            inputs = [name for name in inputs if name not in dropped]
        used = {"target": [target], "inputs": inputs}
        used |= {"client": [client] if client else [], "labels": [labels] if labels else []}
        for role, names in used.items():
            for name in names:
                if name not in columns:
                    raise ValueError(
                        f"Expected argument `{role}` to name a column but got {name!r} (columns:"
                        f" {', '.join(columns)})."
                    )
                if role != "client" and name in texts:
                    raise ValueError(
                        f"Expected column {name!r} to hold numbers but got text: encode it before,"
                        " by `dataset.map` or `dataset.class_encode_column`."
                    )
                _check_no_date(dataset, name)
        if not inputs:
            raise ValueError(
                f"Expected a column of inputs but got none (columns: {', '.join(columns)}): encode"
                " texts before, by `dataset.map`."
            )
        return BatchRoles(client, inputs, target, labels)


class _Rows:
    """The rows of some columns of a data set, as dicts of tensors in the columns' types.

    Args:
        dataset: The data set.
        columns: The columns.
        class_names: The names of the classes of each column in all data sets, in the order of their
            ids; ``None`` for other columns.
    """

    def __init__(
        self, dataset: Any, columns: Sequence[Any], class_names: Mapping[Any, list[str] | None]
    ) -> None:
        self.types = {name: _type_of(dataset.features[name]) for name in columns}
        doubles = [name for name, kind in self.types.items() if kind == "float64"]
        others = [name for name in self.types if name not in doubles]
        double: dict[str, Any] = {"dtype": torch.float64}
        formats = ((others, dict[str, Any]()), (doubles, double))  # by default float32
        self.views = [
            dataset.with_format("torch", columns=names, **options)
            for names, options in formats
            if names
        ]
        self.plain = dataset.with_format(None)
        self.new_ids: dict[Any, Tensor] = {}
        for name, names in class_names.items():
            own = getattr(dataset.features[name], "names", None)
            if names is not None and own is not None and own != names[: len(own)]:
                self.new_ids[name] = torch.tensor([names.index(value) for value in own])

    def __len__(self) -> int:
        return len(self.views[0])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several rows, faster than one by one; a DataLoader calls it."""
        try:
            columns = {k: v for view in self.views for k, v in view[list(indices)].items()}
        except (AttributeError, TypeError):  # of datasets, by a list that is missing
            rows = self.plain[list(indices)]
            for name in self.types:
                if None in rows[name]:
                    raise _missing_value_error(name) from None
            raise
        for name, ids in self.new_ids.items():
            columns[name] = torch.where(columns[name] < 0, columns[name], ids[columns[name]])
        types = self.types
        return [
            {name: _restore_type(name, value, types[name]) for name, value in zip(types, row)}
            for row in zip(*(columns[name] for name in types))
        ]


class _JoinedRows:
    """The rows of several data sets, one after another."""

    def __init__(self, pieces: Sequence[_Rows]) -> None:
        self.pieces = pieces
        self.begins = [sum(map(len, pieces[:number])) for number in range(len(pieces))]

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several rows; consecutive rows of a data set are read at once."""
        rows: list[dict[str, Any]] = []
        numbers = [bisect.bisect_right(self.begins, index) - 1 for index in indices]
        for number, group in itertools.groupby(zip(numbers, indices), lambda pair: pair[0]):
            own = [index - self.begins[number] for _, index in group]
            rows += self.pieces[number].__getitems__(own)
        return rows


def _join_class_names(pieces: Sequence[Any], column: Any) -> list[str] | None:
    """Return the names of a column's classes in all data sets; ``None`` unless all have names."""
    lists = [getattr(piece.features[column], "names", None) for piece in pieces]
    if any(names is None for names in lists):
        return None
    return [*dict.fromkeys(name for names in lists for name in names or ())]


def _check_columns(piece: Any, first: Any, columns: Sequence[Any]) -> None:
    """Raise ``ValueError`` unless a data set has some columns of another one, in their types."""
    for name in columns:
        if name not in piece.column_names:
            raise ValueError(
                f"Expected all parts of the data set to have the column {name!r} but got one with"
                f" {', '.join(piece.column_names)}: give all parts the same columns."
            )
        kinds = [_describe_feature(part.features[name]) for part in (first, piece)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"Expected column {name!r} to have one type in all parts but got"
                f" {' and '.join(kinds)}: cast it by `dataset.cast_column`."
            )


def _describe_feature(feature: Any) -> str:
    """Return the type of a column, without the names of classes and fixed lengths."""
    if getattr(feature, "names", None) is not None:
        return "ClassLabel"
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return f"list of {_describe_feature(inner)}"
    return str(getattr(feature, "dtype", type(feature).__name__))


def _check_labels(piece: Any, target: Any) -> None:
    """Raise ``ValueError`` for a part whose labels are hidden, as in the test part of GLUE."""
    if getattr(piece.features[target], "names", None) is None or not len(piece):
        return
    hidden = sum(label is not None and label < 0 for label in piece.with_format(None)[target])
    if hidden:
        part = str(getattr(piece, "split", None) or "a part")
        raise ValueError(
            f"Expected all samples to have labels but got {hidden} of {len(piece)} with the label"
            f" -1 in {part} of the data set, whose labels are hidden: leave it out by"
            " `data.dataset.splits`, for example {train: train, validation: test}."
        )


def _list_selected(dataset: Any) -> list[str]:
    """Return the columns that ``set_format("torch", columns=...)`` selects; by default all."""
    selection = dataset.format
    selected = dataset.column_names if selection["output_all_columns"] else selection["columns"]
    return list(selected)


def _holds_row_numbers(dataset: Any, name: str) -> bool:
    """Return whether a column holds row numbers of pandas."""
    if is_row_number(name):
        return True
    if name.lower() not in INDEX_NAMES or "int" not in str(_type_of(dataset.features[name])):
        return False
    return len({*dataset.with_format(None)[name]}) == len(dataset)


_SMALL_INTEGERS = (torch.int8, torch.int16, torch.uint16)  # uint8 is that of images
_TEXTS = ("string", "large_string")
_DATES = ("date", "time", "duration")  # the beginnings of the types


def _check_no_date(dataset: Any, name: str) -> None:
    """Raise ``ValueError`` for a column of dates, times or durations."""
    kind = _type_of(dataset.features[name]) or ""
    if kind.startswith(_DATES):
        raise ValueError(
            f"Expected column {name!r} to hold numbers, or text for `client`, but got {kind}:"
            " convert it before, by `dataset.map`, or leave it out by `inputs`."
        )


def _type_of(feature: Any) -> str | None:
    """Return the type of the numbers of a column, also within lists; ``None`` for images."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    kind = getattr(feature, "dtype", None)
    return kind if isinstance(kind, str) else None


def _restore_type(name: Any, value: Any, kind: str | None) -> Any:
    """Return a tensor in the type of its column; datasets gives int64 for all integers.

    Masks and types of tokens have 8 bits in a tokenized data set. They become int32, because
    embeddings take no smaller integers.

    Raises:
        ValueError: If a value is missing: datasets gives NaN for an integer, and otherwise `None`.
    """
    dtype = getattr(torch, kind or "", None)
    if dtype in _SMALL_INTEGERS:
        dtype = torch.int32
    is_missing = value is None
    if isinstance(value, Tensor) and isinstance(dtype, torch.dtype):
        is_real = value.is_floating_point() and not dtype.is_floating_point
        is_missing = is_real and bool(value.isnan().any())
        value = value if is_missing else value.to(dtype)
    if is_missing:
        raise _missing_value_error(name)
    return value


def _missing_value_error(name: Any) -> ValueError:
    return ValueError(
        f"Expected column {name!r} to hold a value in each row but got a missing one: fill it in by"
        " `dataset.map`, or remove its row by `dataset.filter`"
    )


def _check_plain(datasets: Any, dataset: Any) -> None:
    if not isinstance(dataset, datasets.Dataset):
        raise TypeError(
            "Expected argument `dataset` to be a datasets.Dataset or DatasetDict but got"
            f" {type(dataset).__name__}: load it without streaming."
        )
    if dataset.format["type"] == "custom":
        raise TypeError(
            "Expected argument `dataset` to be a data set without a transform but got one with"
            " `set_transform`: pass pl_fed.data.TorchDataset(dataset), or apply it by"
            " `dataset.map`."
        )


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ModuleNotFoundError(
            "Expected the package datasets to be installed but it is not: run `pip install"
            " pl_fed[hf]`."
        ) from error
    return datasets
