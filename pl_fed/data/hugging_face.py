"""Your own data from a Hugging Face ``datasets.Dataset``, in memory or on disk."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pl_fed.arguments import check_integers
from pl_fed.data.batch_roles import BatchRoles
from pl_fed.data.columns import PARTS
from pl_fed.data.dataset_reading import ReadingOptions, read_data_sets
from pl_fed.data.source import TRAIN, Arrays, DataSource
from pl_fed.data.torch_dataset import build_roles, choose_collation
from pl_fed.text import first_line


class HuggingFace(DataSource):
    """Hugging Face data: a ``datasets.Dataset``, or a ``DatasetDict`` with official parts.

    Columns keep their types: uint8 stays uint8, and ids stay integers. Inputs are a dict of
    columns, and the net is called as ``net(input_ids=..., attention_mask=...)``; a single column is
    the tensor itself. Tokenize texts before, by ``dataset.map``. Of a ``DatasetDict``, ``train``,
    ``validation`` and ``test`` are the official parts.

    Needs the package datasets: ``pip install pl_fed[hf]``.

    Args:
        dataset: The data set, or the folder of ``dataset.save_to_disk``.
        client: The column of the owner of each sample, integers or text. No partitioner is needed
            then.
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
        pieces = [("train", dataset)]
        if isinstance(dataset, datasets.DatasetDict):
            pieces = [(name, piece) for name, piece in dataset.items() if name in PARTS]
            if not pieces:
                raise ValueError(
                    "Expected argument `dataset` to hold train, validation or test but got"
                    f" {', '.join(dataset) or 'nothing'}: pass one of its data sets."
                )
        for _, piece in pieces:
            _check_plain(datasets, piece)
        sizes = torch.tensor([len(piece) for _, piece in pieces])
        joined = datasets.concatenate_datasets([piece for _, piece in pieces])
        arrays = self._read(joined)
        if len(pieces) > 1:
            parts = torch.tensor([PARTS[name] for name, _ in pieces])
            arrays = replace(arrays, split=parts.repeat_interleave(sizes))
        return arrays

    def _load_from_disk(self, datasets: Any) -> Any:
        folder = Path(self.dataset).expanduser()
        try:
            return datasets.load_from_disk(folder)
        except Exception as error:  # of any type, by a missing or broken file
            raise FileNotFoundError(
                "Expected argument `dataset` to be a folder written by `dataset.save_to_disk` but"
                f" got {folder.absolute()} ({first_line(error)}): set `data.dataset.dataset`."
            ) from error

    def _read(self, dataset: Any) -> Arrays:
        roles = self._find_columns(dataset)
        optional = [name for name in (roles.client, roles.labels) if name is not None]
        rows = _Rows(dataset, [*(roles.inputs or ()), roles.target, *optional])
        classes = self.num_classes
        if classes is None:
            classes = getattr(dataset.features[roles.target], "num_classes", None)
        self.preparation = f"inputs: {', '.join(map(str, roles.inputs or ()))}"
        return read_data_sets({TRAIN: rows}, roles, self.collate_fn, classes, self.options)

    def _find_columns(self, dataset: Any) -> BatchRoles:
        """Return the roles with the names of all columns that are used."""
        columns, client = dataset.column_names, self.roles.client
        target = self.roles.find_target([name for name in columns if name != client])
        labels = self.roles.labels
        others = [name for name in columns if name not in (client, target, labels)]
        texts = {name for name in columns if _type_of(dataset.features[name]) in _TEXTS}
        inputs = self.roles.inputs
        if inputs is None:
            inputs = [name for name in others if name not in texts]
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
        if not inputs:
            raise ValueError(
                f"Expected a column of inputs but got none (columns: {', '.join(columns)}): encode"
                " texts before, by `dataset.map`."
            )
        return BatchRoles(client, inputs, target, labels)


class _Rows:
    """The rows of some columns of a data set, as dicts of tensors in the columns' types."""

    def __init__(self, dataset: Any, columns: Sequence[Any]) -> None:
        self.types = {name: _type_of(dataset.features[name]) for name in columns}
        doubles = [name for name, kind in self.types.items() if kind == "float64"]
        others = [name for name in self.types if name not in doubles]
        formats = ((others, {}), (doubles, {"dtype": torch.float64}))  # by default float32
        self.views = [
            dataset.with_format("torch", columns=names, **options)
            for names, options in formats
            if names
        ]

    def __len__(self) -> int:
        return len(self.views[0])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several rows, faster than one by one; a DataLoader calls it."""
        columns = {k: v for view in self.views for k, v in view[list(indices)].items()}
        types = self.types
        return [
            {name: _restore_type(value, types[name]) for name, value in zip(types, row)}
            for row in zip(*(columns[name] for name in types))
        ]


_TEXTS = ("string", "large_string")


def _type_of(feature: Any) -> str | None:
    """Return the type of the numbers of a column, also within lists; ``None`` for images."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    kind = getattr(feature, "dtype", None)
    return kind if isinstance(kind, str) else None


def _restore_type(value: Any, kind: str | None) -> Any:
    """Return a tensor in the type of its column; datasets gives int64 for all integers."""
    dtype = getattr(torch, kind or "", None)
    is_number = isinstance(value, Tensor) and isinstance(dtype, torch.dtype)
    return value.to(dtype) if is_number else value


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
