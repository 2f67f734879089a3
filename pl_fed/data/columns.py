"""Columns of a table as tensors: inputs, targets, clients and official parts."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from numbers import Integral
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pl_fed.data.column_roles import ColumnRoles, quote_hint
from pl_fed.data.reading import report_read_errors
from pl_fed.data.source import TEST, TRAIN, VAL, Arrays
from pl_fed.text import escape_controls
from pl_fed.trees import Tree

TABLE_KINDS = {".csv": "a CSV file", ".tsv": "a CSV file", ".parquet": "a parquet file"}
_COMPRESSED = (".gz", ".bz2", ".zst")
PARTS = {"train": TRAIN, "val": VAL, "valid": VAL, "validation": VAL, "test": TEST}
INDEX_NAMES = ("index", "level_0")  # row numbers if all are different integers
_ROW_NUMBERS = re.compile(r"Unnamed: 0(\.\d+)*|__index_level_\d+__")
_REAL = re.compile(r"[^\w]*\d[\d.,' ]*[.,]\d+[^\w]*")  # also 1,200 and 3,14 and $1.50
_BOOLEAN_NAMES = ("yes", "no", "on", "off")  # YAML reads them as booleans without quotes
_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}
_OTHER = "other"  # the category of values outside of the categories
_LISTED = 100  # largest number of categories that a preparation lists


def table_suffix(path: Path) -> str:
    """Return the suffix of a table's kind, such as ``".csv"`` for ``a.csv.gz``."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in _COMPRESSED else suffix


def read_table(
    path: Path,
    delimiter: str | None = None,
    names: Sequence[str] = (),
    texts: Sequence[str] = (),
    reals: Sequence[str] = (),
) -> Any:
    """Return the ``pyarrow.Table`` of a CSV or parquet file.

    Args:
        path: An existing file with a suffix in :data:`TABLE_KINDS`.
        delimiter: The character between values of a CSV file; ``None`` for a comma, or a tab in a
            ``.tsv`` file.
        names: Columns of names, such as owners and classes. In a CSV file, they become numbers only
            if this keeps each name as it is written: ``007`` and ``7`` are two names.
        texts: Columns of names that are read as text.
        reals: Columns of ``names`` that hold no names if all their values are numbers, and one of
            them is real. They become numbers, however these are written.

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
            return _as_text(parquet.ParquetFile(path).read(), texts)
        separator = delimiter or ("\t" if suffix == ".tsv" else ",")
        options = csv.ParseOptions(delimiter=separator, newlines_in_values=True)
        table = csv.read_csv(path, parse_options=options)
        columns = table.column_names
        named = [name for name in dict.fromkeys(names) if columns.count(name) == 1]
        named = [name for name in named if not _is_text(table.schema.field(name).type)]
        if not named:
            return table
        convert = csv.ConvertOptions(
            include_columns=named, column_types=dict.fromkeys(named, "string")
        )
        written = csv.read_csv(path, parse_options=options, convert_options=convert)
        return _keep_names(table, written, texts, reals)


def _keep_names(table: Any, written: Any, texts: Sequence[str], reals: Sequence[str]) -> Any:
    """Return a table with columns as they are written, where numbers would change a name."""
    import pyarrow as pa
    from pyarrow import compute

    for name in written.column_names:
        column, text = table.column(name), written.column(name)
        is_open = name in reals and name not in texts and _is_real(column.type)
        if is_open and compute.any(compute.match_substring_regex(text, "[.eE]")).as_py():
            continue  # numbers such as 1.50, and no names such as +7
        changes = compute.not_equal(column.cast("string"), text)
        if name in texts or bool(compute.any(changes).as_py()):
            if not (name in texts and pa.types.is_null(column.type)):  # NA is a name among names
                text = compute.if_else(compute.is_null(column), None, text)
            table = table.set_column(table.column_names.index(name), name, text)
    return table


def _as_text(table: Any, texts: Sequence[str]) -> Any:
    """Return a table with some columns as text."""
    for name in texts:
        column = table.column(name).cast("string")
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def drop_row_numbers(table: Any, roles: ColumnRoles) -> tuple[Any, list[str]]:
    """Return a table without the row numbers of pandas, and the names of these columns.

    Row numbers are no inputs: they say where a row was written, and often tell its class. Columns
    that a role names stay.

    Args:
        table: A ``pyarrow.Table``.
        roles: The use of each column.
    """
    if roles.inputs is not None:
        return table, []
    used = roles.list_columns()
    metadata = table.schema.pandas_metadata or {}
    indices = [name for name in metadata.get("index_columns", []) if isinstance(name, str)]
    names = [
        name
        for position, name in enumerate(table.column_names)
        if name not in used
        and (
            name in indices
            or is_row_number(name, position)
            or (name.lower() in INDEX_NAMES and _is_distinct(table.column(name)))
        )
    ]
    return (table.drop_columns(names) if names else table), names


def is_row_number(name: str, position: int = 1) -> bool:
    """Return whether pandas gives this name to row numbers, by the position of the column.

    Example:
        >>> [is_row_number(name) for name in ("Unnamed: 0", "__index_level_0__", "age")]
        [True, True, False]
    """
    return (not name and not position) or _ROW_NUMBERS.fullmatch(name) is not None


def warn_of_row_numbers(names: Sequence[str], place: str) -> None:
    """Say that columns of row numbers are no inputs."""
    if names:
        listed = ", ".join(map(repr, dict.fromkeys(names)))
        rank_zero_warn(
            f"pl_fed leaves out the column {listed} of {place}, because it holds row numbers: add"
            " it to `exclude` to confirm this, or list it in `inputs` to use it."
        )


def _is_distinct(column: Any) -> bool:
    """Return whether a column holds integers, no two of them equal."""
    import pyarrow as pa

    return pa.types.is_integer(column.type) and len(column.unique()) == len(column)


def find_texts(tables: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Return the columns that hold text in one of several tables, or booleans in some only."""
    import pyarrow as pa

    columns = []
    for name in dict.fromkeys(names):
        kinds = [table.schema.field(name).type for table in tables if name in table.column_names]
        kinds = [kind for kind in kinds if not pa.types.is_null(kind)]
        if any(map(_is_text, kinds)) or len({*map(pa.types.is_boolean, kinds)}) > 1:
            columns.append(name)
    return columns


def join_tables(tables: Sequence[Any], roles: ColumnRoles) -> Any:
    """Return the rows of several tables in one, without columns that have no role.

    Numbers of an input or a target may be booleans in some tables: they become 0 and 1.

    Args:
        tables: Tables with the columns of the first one, in any order.
        roles: The use of each column.
    """
    import pyarrow as pa

    used = {*roles.input_columns(tables[0].column_names), *roles.targets, roles.split, roles.group}
    names = roles.name_columns()
    joined = []
    for table in tables:
        table = table.select([name for name in tables[0].column_names if name in used])
        for place, field in enumerate(table.schema):
            if pa.types.is_boolean(field.type) and field.name not in names:
                table = table.set_column(place, field.name, table.column(place).cast(pa.int8()))
        joined.append(table)
    return pa.concat_tables(joined, promote_options="permissive")


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def check_delimiter(delimiter: str | None) -> None:
    """Raise ``ValueError`` unless a delimiter is one character, or ``None``."""
    if delimiter is not None and (not isinstance(delimiter, str) or len(delimiter) != 1):
        raise ValueError(
            f"Expected argument `delimiter` to be one character but got {delimiter!r}."
        )


def check_categories(categories: Any, roles: ColumnRoles) -> None:
    """Raise an error unless categories are lists of different values of columns of categories.

    Raises:
        TypeError: If an argument is no dict of lists.
        ValueError: If a column has no categories, or a value occurs twice.
    """
    if categories is None:
        return
    is_dict = isinstance(categories, dict)
    if not is_dict or not all(isinstance(v, list | tuple) and v for v in categories.values()):
        raise TypeError(
            "Expected argument `categories` to hold a list of values for each column but got"
            f" {categories!r}: write, for example, {{animal: [cat, dog]}}."
        )
    groups = () if roles.group is None else (roles.group,)
    columns = [*(roles.one_hot or ()), *(roles.ids or ()), *groups, *roles.targets]
    for name, values in categories.items():
        if name not in columns:
            raise ValueError(
                "Expected argument `categories` to name columns of `one_hot` or `ids`, the group"
                f" or the target, but got {name!r}: add it to `one_hot` or `ids`."
            )
        names = list(map(_write_value, values))
        if len({*names}) < len(names):
            raise ValueError(
                f"Expected argument `categories` to name each value of {name!r} once but got"
                f" {next(value for value in names if names.count(value) > 1)!r} twice."
            )


def find_shared_categories(
    roles: ColumnRoles, categories: Mapping[str, Sequence[Any]] | None, has_classes: bool
) -> dict[str, str]:
    """Return the columns whose values are numbered over all clients, by the argument to set.

    A column of groups that is no input is not among them: no model depends on it.

    Args:
        roles: The use of each column.
        categories: The given values.
        has_classes: Whether the target holds classes.
    """
    columns = [*(roles.one_hot or ()), *(roles.ids or ()), *(roles.targets if has_classes else ())]
    missing = [name for name in columns if name not in (categories or {})]
    return {"categories": f"none for {', '.join(map(repr, missing))}"} if missing else {}


@dataclass(frozen=True)
class TableArrays:
    """The samples of a table, and their preparation in words.

    Attributes:
        arrays: The samples.
        preparation: The preparation of the inputs and targets.
        columns: The columns of the inputs in their order, and the values of those of ids.
    """

    arrays: Arrays
    preparation: str
    columns: dict[str, list[str]]


def build_arrays(
    table: Any, roles: ColumnRoles, categories: Mapping[str, Sequence[Any]] | None = None
) -> TableArrays:
    """Return the samples of a table, one per row.

    Args:
        table: A ``pyarrow.Table``.
        roles: The use of each column.
        categories: The values of columns of categories, classes or owners, in the order of their
            numbers. ``None`` numbers the values of the table.

    Raises:
        ValueError: If a column is missing, or has values that do not fit its role.
    """
    roles.check_columns(table.column_names)
    if not len(table):
        raise ValueError("Expected a table of at least one row but got none")
    categories = categories or {}
    inputs, columns, words = _build_inputs(table, roles, categories)
    targets, classes = _build_targets(table, roles, categories)
    client, names = None, None
    if roles.client is not None:
        client, names = _build_owners(table, "client", roles.client)
    groups: Tensor | None = None
    group_names: list[str] = []
    if roles.group is not None:
        groups, group_names = _build_owners(table, "group", roles.group, categories)
        words.append(f"groups by {roles.group}: {', '.join(group_names)}")
    split = None if roles.split is None else _build_split(table, roles.split)
    if classes:
        words.append(f"classes: {', '.join(classes)}")
    arrays = Arrays(
        inputs,
        targets,
        client,
        split,
        len(classes),
        names,
        class_names=tuple(map(str, classes)),
        groups=groups,
        group_names=group_names,
    )
    return TableArrays(arrays, escape_controls("; ".join(words)), columns)


def _build_inputs(
    table: Any, roles: ColumnRoles, categories: Mapping[str, Sequence[Any]]
) -> tuple[Tree, dict[str, list[str]], list[str]]:
    """Return the numbers, the ids, or both as a tuple; the columns; and both in words.

    A column of ids has its values; a column of categories is one of numbers for each of them.
    """
    numbers, ids, names, descriptions = [], [], [], []
    values_of_ids: dict[str, list[str]] = {}
    for name in roles.input_columns(table.column_names):
        if name in (roles.ids or ()):
            codes, values = _encode_category(table, name, categories.get(name))
            ids.append(codes)
            values_of_ids[name] = values
            listed = ", ".join(values) if len(values) <= _LISTED else f"{len(values)} categories"
            descriptions.append(f"{name} ({listed})")
        elif name in (roles.one_hot or ()):
            codes, values = _encode_category(table, name, categories.get(name))
            numbers.append(np.eye(len(values))[codes])
            names += [f"{name}={value}" for value in values]
        else:
            numbers.append(_read_numbers(table, name)[:, None])
            names.append(name)
    words = [f"inputs: {', '.join(names)}"] if names else []
    words += [f"ids: {', '.join(descriptions)}"] if ids else []
    parts = [torch.from_numpy(np.concatenate(numbers, 1))] if numbers else []
    parts += [torch.from_numpy(np.stack(ids, 1))] if ids else []
    columns: dict[str, list[str]] = {name: [] for name in names}
    return (parts[0] if len(parts) == 1 else tuple(parts)), {**columns, **values_of_ids}, words


def _build_targets(
    table: Any, roles: ColumnRoles, categories: Mapping[str, Sequence[Any]]
) -> tuple[Tensor, list[str]]:
    """Return class ids [samples] and the classes, or real values [samples, columns] and ``[]``."""
    is_class = roles.classes
    if is_class is None and len(roles.targets) == 1:
        name = roles.targets[0]
        is_class = name in categories or not _is_real(table.schema.field(name).type)
        if is_class and name not in categories:
            _warn_of_numbers_as_text(table, name)
    if is_class:
        (name,) = roles.targets
        _check_complete(table, name)
        ids, values = _encode(table, name)
        if name in categories:
            ids, values = _encode_category(table, name, categories[name], with_others=False)
        else:
            _warn_of_two_writings(name, values)
        return torch.from_numpy(ids), values
    columns = [_read_numbers(table, name) for name in roles.targets]
    return torch.from_numpy(np.stack(columns, 1)), []


def _warn_of_two_writings(name: str, values: Sequence[str]) -> None:
    """Say that values have two ids because of a space, of Unicode, pandas or programs' booleans.

    Some systems write an accent as a letter of its own behind the letter that it belongs to.
    pandas writes integers as real numbers in a file where another value of the column is missing,
    and booleans as ``True``; other programs write ``true``, ``TRUE`` or 1.
    """
    by_words: dict[str, list[str]] = {}
    for value in values:
        by_words.setdefault(value.strip(), []).append(value)
    spaced = next((names for names in by_words.values() if len(names) > 1), None)
    if spaced is not None:
        rank_zero_warn(
            f"pl_fed takes {spaced[0]!r} and {spaced[1]!r} in column {name!r} for two values,"
            " because of a space before or after the name: remove the space."
        )
    if forms := find_two_forms(values):
        rank_zero_warn(
            f"pl_fed takes {forms[0]!a} and {forms[1]!a} in column {name!r} for two values, because"
            " their letters have two forms in Unicode: write all values by"
            " unicodedata.normalize('NFC', value)."
        )
    written = {*values}
    doubled = [value for value in values if f"{value}.0" in written]
    if doubled:
        rank_zero_warn(
            f"pl_fed takes {doubled[0]!r} and '{doubled[0]}.0' in column {name!r} for two values,"
            " because they are written differently, as by pandas in a column with a missing value:"
            " write them alike, in pandas by `astype('Int64')`."
        )
    booleans = {value: _BOOLEANS.get(value.lower()) for value in values if value != "missing"}
    if None in booleans.values():
        return
    pairs = [(a, b) for a, b in combinations(booleans, 2) if booleans[a] == booleans[b]]
    if pairs:
        rank_zero_warn(
            f"pl_fed takes {pairs[0][0]!r} and {pairs[0][1]!r} in column {name!r} for two values,"
            " because they are written differently: write all booleans of the column alike."
        )


def find_two_forms(names: Sequence[str]) -> list[str]:
    """Return the first names that differ by their form in Unicode only; empty without such names.

    Example:
        >>> len(find_two_forms(["Uri", "Zürich", unicodedata.normalize("NFD", "Zürich")]))
        2
    """
    by_form: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        by_form.setdefault(unicodedata.normalize("NFC", name), []).append(name)
    return next((names for names in by_form.values() if len(names) > 1), [])


def _warn_of_numbers_as_text(table: Any, name: str) -> None:
    """Say that a target holds classes if it is text and most values look like real numbers."""
    column = _plain(table, name)
    values = column.drop_null().unique().to_pylist() if _is_text(column.type) else []
    reals = [value for value in values if _REAL.fullmatch(value)]
    if 2 * len(reals) > len(values):
        others = [value for value in values if value not in reals]
        rank_zero_warn(
            f"pl_fed takes the target {name!r} for classes, because its column holds text such as"
            f" {(others or reals)[0]!r}: write all values as numbers for a regression, or set"
            " `classes: true` to confirm this."
        )


def _build_owners(
    table: Any, role: str, name: str, categories: Mapping[str, Sequence[Any]] | None = None
) -> tuple[Tensor, list[str]]:
    """Return the id of each row's client or group, and their names.

    Args:
        table: The table.
        role: The argument that names the column, ``client`` or ``group``.
        name: The column.
        categories: The values of columns in the order of their ids; other values share one more.
    """
    _check_complete(table, name)
    if _is_real(table.schema.field(name).type):
        _refuse(table, name, f"integers or text for `{role}`", "round it, or write it as text")
    ids, names = _encode_category(table, name, (categories or {}).get(name))
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

    Missing values have an id of their own, the last. In a CSV file, missing text is empty.
    """
    import pyarrow as pa
    from pyarrow import compute

    column = _plain(table, name)
    if pa.types.is_nested(column.type):
        _refuse(table, name, "categories", "leave it out by `exclude`")
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        column = column.cast(pa.string())
        is_empty = compute.equal(compute.utf8_trim_whitespace(column), "")
        column = compute.if_else(is_empty.fill_null(True), None, column)
    values = column.unique().drop_null().sort()
    ids = (
        compute.index_in(column, value_set=values)
        .fill_null(len(values))
        .to_numpy(zero_copy_only=False)
    )
    names = [str(value) for value in values.to_pylist()]
    return ids.astype(np.int64), [*names, "missing"] if column.null_count else names


def _encode_category(
    table: Any, name: str, categories: Sequence[Any] | None, with_others: bool = True
) -> tuple[np.ndarray, list[str]]:
    """Return the id of each row's value, and the values: the categories, and one for all others.

    Without categories, ids are numbered over the table, as by :func:`_encode`.

    Args:
        table: The table.
        name: The column.
        categories: The values, in the order of their ids.
        with_others: Whether other and missing values have an id of their own, the last; else they
            are refused.
    """
    ids, values = _encode(table, name)
    if categories is None:
        _warn_of_two_writings(name, values)
        return ids, values
    names = list(map(_write_value, categories))
    number = {value: position for position, value in enumerate(names)}
    for position, value in enumerate(categories):
        if isinstance(value, bool):  # as pandas and spreadsheets write it
            for text in (str(value), str(value).upper()):
                number.setdefault(text, position)
        elif isinstance(value, Integral):  # pandas writes 1.0 beside a missing value
            number.setdefault(f"{value}.0", position)
    if _is_real(_plain(table, name).type):  # integers beside missing values are real numbers
        number = {f"{value}.0": position for value, position in number.items()} | number
    unknown = [value for value in values if value not in number]
    _refuse_booleans_for_names(name, categories, unknown)
    if unknown and not with_others:
        raise ValueError(
            f"Expected column {name!r} to hold the classes that `categories` names but got"
            f" {unknown[0]!r} (there are: {', '.join(names)}): add it"
        )
    codes = np.array([number.get(value, len(names)) for value in values], dtype=np.int64)
    return codes[ids], [*names, _OTHER] if with_others else names


def _refuse_booleans_for_names(
    name: str, categories: Sequence[Any], unknown: Sequence[str]
) -> None:
    """Raise ``ValueError`` if categories are booleans, but a column holds yes, no, on or off."""
    booleans = [value for value in categories if isinstance(value, bool)]
    words = [value for value in unknown if value.lower() in _BOOLEAN_NAMES]
    if booleans and words:
        raise ValueError(
            f"Expected argument `categories` to hold values of column {name!r}, such as"
            f" {words[0]!r}, but got {booleans[0]!r}{quote_hint(categories)}"
        )


def _write_value(value: Any) -> str:
    """Return a value of a config as a table writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


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
    try:
        numbers: np.ndarray = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        remedy = "add it to `ids` if it holds names, or leave it out by `exclude`"
        _refuse(table, name, "integers that float64 does not round, up to 2^53,", remedy)
    _check_finite(name, numbers)
    return numbers


def _plain(table: Any, name: str) -> Any:
    """Return a column of a table as one array, without a dictionary of its values.

    NaN is a missing value, too: some programs write it to parquet files as a number.
    """
    import pyarrow as pa
    from pyarrow import compute

    column = table.column(name)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_floating(column.type):
        column = compute.if_else(compute.is_nan(column), None, column)
    return column.combine_chunks()


def _is_real(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _check_complete(table: Any, name: str) -> None:
    """Raise ``ValueError`` if a value is missing; in a CSV file, missing text is empty."""
    from pyarrow import compute

    column = _plain(table, name)
    absent = column.is_null()
    if _is_text(column.type):
        absent = compute.or_(
            absent, compute.equal(compute.utf8_trim_whitespace(column), "").fill_null(True)
        )
    missing = absent.to_numpy(zero_copy_only=False)
    if missing.any():
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
