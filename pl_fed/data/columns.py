"""Columns of a table as tensors: inputs, targets, clients and official parts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from pl_fed.data.column_roles import ColumnRoles
from pl_fed.data.reading import report_read_errors
from pl_fed.data.source import TEST, TRAIN, VAL, Arrays
from pl_fed.text import escape_controls
from pl_fed.trees import Tree

TABLE_KINDS = {".csv": "a CSV file", ".tsv": "a CSV file", ".parquet": "a parquet file"}
_COMPRESSED = (".gz", ".bz2", ".zst")
PARTS = {"train": TRAIN, "val": VAL, "valid": VAL, "validation": VAL, "test": TEST}
_LISTED = 100  # largest number of categories that a preparation lists


def table_suffix(path: Path) -> str:
    """Return the suffix of a table's kind, such as ``".csv"`` for ``a.csv.gz``."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in _COMPRESSED else suffix


def read_table(path: Path, delimiter: str | None = None) -> Any:
    """Return the ``pyarrow.Table`` of a CSV or parquet file.

    Args:
        path: An existing file with a suffix in :data:`TABLE_KINDS`.
        delimiter: What separates the values in a CSV file; ``None`` for a comma, or a tab in a
            ``.tsv`` file.

    Raises:
        ModuleNotFoundError: If the package pyarrow is not installed.
        ValueError: If the file is broken.
    """
    try:
        from pyarrow import csv, parquet
    except ImportError as error:
        raise ModuleNotFoundError(
            f"Expected the package pyarrow to be installed for {path.name} but it is not: run `pip"
            " install pl_fed[tables]`."
        ) from error
    suffix = table_suffix(path)
    with report_read_errors(path, TABLE_KINDS[suffix]):
        if suffix == ".parquet":
            return parquet.ParquetFile(path).read()
        separator = delimiter or ("\t" if suffix == ".tsv" else ",")
        options = csv.ParseOptions(delimiter=separator, newlines_in_values=True)
        return csv.read_csv(path, parse_options=options)


def check_delimiter(delimiter: str | None) -> None:
    """Raise ``ValueError`` unless a delimiter is one character, or ``None``."""
    if delimiter is not None and (not isinstance(delimiter, str) or len(delimiter) != 1):
        raise ValueError(
            f"Expected argument `delimiter` to be one character but got {delimiter!r}."
        )


@dataclass(frozen=True)
class TableArrays:
    """The samples of a table, and their preparation in words."""

    arrays: Arrays
    preparation: str


def build_arrays(table: Any, roles: ColumnRoles) -> TableArrays:
    """Return the samples of a table, one per row.

    Args:
        table: A ``pyarrow.Table``.
        roles: The use of each column.

    Raises:
        ValueError: If a column is missing, or has values that do not fit its role.
    """
    roles.check_columns(table.column_names)
    if not len(table):
        raise ValueError("Expected a table of at least one row but got none")
    inputs, words = _build_inputs(table, roles)
    targets, classes = _build_targets(table, roles)
    client, names = None, None
    if roles.client is not None:
        client, names = _build_clients(table, roles.client)
    split = None if roles.split is None else _build_split(table, roles.split)
    if classes:
        words.append(f"classes: {', '.join(classes)}")
    arrays = Arrays(inputs, targets, client, split, len(classes), names)
    return TableArrays(arrays, escape_controls("; ".join(words)))


def _build_inputs(table: Any, roles: ColumnRoles) -> tuple[Tree, list[str]]:
    """Return the numbers, the ids, or both as a tuple; and the names of their columns."""
    numbers, ids, names, categories = [], [], [], []
    for name in roles.input_columns(table.column_names):
        if name in (roles.ids or ()):
            codes, values = _encode(table, name)
            ids.append(codes)
            listed = ", ".join(values) if len(values) <= _LISTED else f"{len(values)} categories"
            categories.append(f"{name} ({listed})")
        elif name in (roles.one_hot or ()):
            codes, values = _encode(table, name)
            numbers.append(np.eye(len(values))[codes])
            names += [f"{name}={value}" for value in values]
        else:
            numbers.append(_read_numbers(table, name)[:, None])
            names.append(name)
    words = [f"inputs: {', '.join(names)}"] if names else []
    words += [f"ids: {', '.join(categories)}"] if ids else []
    parts = [torch.from_numpy(np.concatenate(numbers, 1))] if numbers else []
    parts += [torch.from_numpy(np.stack(ids, 1))] if ids else []
    return (parts[0] if len(parts) == 1 else tuple(parts)), words


def _build_targets(table: Any, roles: ColumnRoles) -> tuple[Tensor, list[str]]:
    """Return class ids [samples] and the classes, or real values [samples, columns] and ``[]``."""
    is_class = roles.classes
    if is_class is None and len(roles.targets) == 1:
        is_class = not _is_real(table.schema.field(roles.targets[0]).type)
    if is_class:
        (name,) = roles.targets
        _check_complete(table, name)
        ids, values = _encode(table, name)
        return torch.from_numpy(ids), values
    columns = [_read_numbers(table, name) for name in roles.targets]
    return torch.from_numpy(np.stack(columns, 1)), []


def _build_clients(table: Any, name: str) -> tuple[Tensor, list[str]]:
    _check_complete(table, name)
    if _is_real(table.schema.field(name).type):
        _refuse(table, name, "integers or text for `client`", "round it, or write it as text")
    ids, names = _encode(table, name)
    return torch.from_numpy(ids), names


def _build_split(table: Any, name: str) -> Tensor:
    _check_complete(table, name)
    ids, values = _encode(table, name)
    numbers = {str(part): part for part in (TRAIN, VAL, TEST)}
    parts = [{**PARTS, **numbers}.get(value.lower()) for value in values]
    if None in parts:
        raise ValueError(
            f"Expected column {name!r} to hold train, val and test, or 0, 1 and 2, but got"
            f" {values[parts.index(None)]!r}"
        )
    return torch.tensor(parts)[torch.from_numpy(ids)]


def _encode(table: Any, name: str) -> tuple[np.ndarray, list[str]]:
    """Return the id of each row's value, int64 [rows], and the values in sorted order as text.

    Missing values have an id of their own, the last.
    """
    import pyarrow as pa
    from pyarrow import compute

    column = _plain(table, name)
    if pa.types.is_nested(column.type):
        _refuse(table, name, "categories", "leave it out by `exclude`")
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        column = column.cast(pa.string())
    values = column.unique().drop_null().sort()
    ids = (
        compute.index_in(column, value_set=values)
        .fill_null(len(values))
        .to_numpy(zero_copy_only=False)
    )
    names = [str(value) for value in values.to_pylist()]
    return ids.astype(np.int64), [*names, "missing"] if column.null_count else names


def _read_numbers(table: Any, name: str) -> np.ndarray:
    """Return a column of finite numbers, float64 [rows]."""
    import pyarrow as pa

    column = _plain(table, name)
    kind, types = column.type, pa.types
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    if not is_number and not types.is_boolean(kind) and not types.is_null(kind):
        _refuse(
            table,
            name,
            "numbers",
            "add it to `one_hot` or `ids` if it holds categories, or leave it out by `exclude`",
        )
    if types.is_boolean(kind):
        column = column.cast(pa.int8())
    numbers: np.ndarray = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    _check_finite(name, numbers)
    return numbers


def _plain(table: Any, name: str) -> Any:
    """Return a column of a table as one array, without a dictionary of its values."""
    import pyarrow as pa

    column = table.column(name)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.combine_chunks()


def _is_real(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _check_complete(table: Any, name: str) -> None:
    """Raise ``ValueError`` if a value is missing."""
    column = table.column(name)
    if column.null_count:
        missing = column.is_null().to_numpy()
        raise ValueError(
            f"Expected column {name!r} to have a value in each row but got none in"
            f" {missing.sum()} rows, first in row {missing.argmax()}: fill in or remove them"
        )


def _check_finite(name: str, numbers: np.ndarray) -> None:
    invalid = ~np.isfinite(numbers)
    if invalid.any():
        raise ValueError(
            f"Expected column {name!r} to hold finite numbers but got missing or infinite ones in"
            f" {invalid.sum()} rows, first in row {invalid.argmax()}: fill in or remove them, or"
            " leave the column out by `exclude`"
        )


def _refuse(table: Any, name: str, expected: str, remedy: str) -> NoReturn:
    kind = table.schema.field(name).type
    raise ValueError(f"Expected column {name!r} to hold {expected} but got {kind}: {remedy}")
