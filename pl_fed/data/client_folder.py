"""Your own data from a folder with one file per client."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pl_fed.arguments import check_integers
from pl_fed.data.column_roles import ColumnRoles
from pl_fed.data.columns import (
    PARTS,
    TABLE_KINDS,
    build_arrays,
    check_categories,
    check_delimiter,
    drop_row_numbers,
    find_shared_categories,
    find_texts,
    find_two_forms,
    join_tables,
    read_table,
    table_suffix,
    warn_of_row_numbers,
)
from pl_fed.data.reading import read_npz, report_read_errors
from pl_fed.data.source import Arrays, DataSource, count_classes
from pl_fed.trees import describe

_LAYOUT = "files .npz, .csv, .tsv or .parquet, one for each client"


@dataclass(frozen=True)
class _ClientFile:
    """A file of one client's samples, and the official part of them all, if there is one."""

    path: Path
    client: str
    part: int | None


class ClientFolder(DataSource):
    """Client folder: your own data from a folder with one file per client.

    The name of a file, without its suffix, is the name of the client. Clients are in the order of
    these names, and numbers in names are compared as numbers: ``client_2`` precedes ``client_10``.
    The files are either all of one of two kinds:

    - ``.npz`` with the arrays ``x`` and ``y`` and, optionally, ``split`` and ``group``: see
      :class:`pl_fed.data.Npz`.
    - Tables (``.csv``, ``.tsv`` or ``.parquet``) with the same columns: see
      :class:`pl_fed.data.Table` for the arguments that name columns. Categories and classes are
      numbered over all files.

    If the files lie in folders ``train``, ``test`` and, optionally, ``val`` (or ``valid`` or
    ``validation``), these are the official parts. A client has the same file name in each of them.

    Args:
        folder: The path of the folder.
        target: The column of the targets, or of several real-valued targets. Required for tables.
        inputs: The columns of the inputs. ``None`` uses all columns without another role.
        exclude: Columns that are no inputs.
        one_hot: Columns of categories, each of which becomes an input of 0 and 1.
        ids: Columns of categories that become ids, for embeddings.
        split: The column of the official part of each sample.
        classes: Whether the target column holds classes. ``None`` infers it.
        delimiter: What separates the values in CSV files. ``None`` for a comma, or a tab in
            ``.tsv`` files.
        num_classes: Number of classes in ``.npz`` files; 0 if integer targets are no class ids.
            ``None`` uses the largest class id + 1.
        categories: The values of columns of categories: see :class:`pl_fed.data.Table`.
        group: The column of the group of each sample: see :class:`pl_fed.data.Table`. Files
            ``.npz`` have an array ``group`` of integers instead.

    Raises:
        TypeError: If an argument is no name, or no list of names.
        ValueError: If a column has two roles.

    Example:
        >>> import tempfile, numpy
        >>> folder = tempfile.mkdtemp()
        >>> for name, samples in (("Bern", 3), ("Uri", 2)):
        ...     x, y = numpy.zeros((samples, 4), "float32"), numpy.arange(samples)
        ...     numpy.savez(f"{folder}/{name}.npz", x=x, y=y)
        >>> arrays = ClientFolder(folder).load()
        >>> arrays.names, arrays.client.tolist(), arrays.targets.tolist()
        (['Bern', 'Uri'], [0, 0, 0, 1, 1], [0, 1, 2, 0, 1])
    """

    def __init__(
        self,
        folder: str,
        target: str | list[str] | None = None,
        inputs: list[str] | None = None,
        exclude: list[str] | None = None,
        one_hot: list[str] | None = None,
        ids: list[str] | None = None,
        split: str | None = None,
        classes: bool | None = None,
        delimiter: str | None = None,
        num_classes: int | None = None,
        categories: dict[str, list[str | int | float | bool]] | None = None,
        group: str | None = None,
    ) -> None:
        check_delimiter(delimiter)
        if num_classes is not None:
            check_integers(0, num_classes=num_classes)
        self.folder = folder
        self.delimiter = delimiter
        self.num_classes = num_classes
        self.roles: ColumnRoles | None = None
        if target is not None:
            self.roles = ColumnRoles(
                target, None, inputs, exclude, one_hot, ids, split, classes, group
            )
            check_categories(categories, self.roles)
        self.categories = categories
        self._has_classes = classes is not False  # :meth:`load` reads it from the column
        self._set = [
            name
            for name, value in self.constructor_arguments.items()
            if name not in ("folder", "num_classes") and value is not None
        ]

    def load(self) -> Arrays:
        """Return the samples of all files, client after client.

        Raises:
            FileNotFoundError: If there is no such folder, or no file in it.
            ModuleNotFoundError: If the files are tables and the package pyarrow is not installed.
            ValueError: If a file is broken, files differ in their kind, arrays or columns, or an
                argument does not fit their kind.
        """
        folder = Path(self.folder).expanduser()
        files = _find_files(folder)
        names = list(dict.fromkeys(file.client for file in files))
        if files[0].path.suffix == ".npz":
            arrays, sizes = self._load_arrays(folder, files)
        else:
            arrays, sizes = self._load_tables(folder, files)
        counts = torch.tensor(sizes)
        clients = torch.tensor([names.index(file.client) for file in files])
        parts = [file.part for file in files if file.part is not None]
        with report_read_errors(folder, "a folder of clients"):
            return replace(
                arrays,
                client=clients.repeat_interleave(counts),
                split=torch.tensor(parts).repeat_interleave(counts) if parts else arrays.split,
                names=names,
            )

    def list_shared_quantities(self) -> dict[str, str]:
        """Return the columns of categories and classes without given values."""
        if self.roles is None:
            return {}
        return find_shared_categories(self.roles, self.categories, self._has_classes)

    def _load_arrays(self, folder: Path, files: Sequence[_ClientFile]) -> tuple[Arrays, list[int]]:
        """Return the samples of ``.npz`` files, and the number of samples in each file."""
        if self._set:
            raise ValueError(
                f"Expected argument `{self._set[0]}` to be left out for .npz files, which have no"
                f" columns, but got {self.constructor_arguments[self._set[0]]!r} for {folder}."
            )
        contents = [self._read_arrays(file, files[0].path) for file in files]
        for file, content in zip(files, contents):
            _check_alike(file.path, content, files[0].path, contents[0])
        joined = {name: torch.cat([c[name] for c in contents]) for name in contents[0]}
        classes = count_classes(joined["y"]) if self.num_classes is None else self.num_classes
        with report_read_errors(folder, "a folder of clients", {"inputs": "x", "targets": "y"}):
            arrays = Arrays(
                joined["x"],
                joined["y"],
                None,
                joined.get("split"),
                classes,
                groups=joined.get("group"),
            )
        return arrays, [len(content["x"]) for content in contents]

    def _read_arrays(self, file: _ClientFile, first: Path) -> dict[str, Tensor]:
        optional = ("split", "group") if file.part is None else ("group",)
        arrays = read_npz(file.path, ("x", "y"), optional)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        classes = count_classes(tensors["y"]) if self.num_classes is None else self.num_classes
        with report_read_errors(file.path, "samples", {"inputs": "x", "targets": "y"}):
            split, groups = tensors.get("split"), tensors.get("group")
            Arrays(tensors["x"], tensors["y"], None, split, classes, groups=groups)
        return tensors

    def _load_tables(self, folder: Path, files: Sequence[_ClientFile]) -> tuple[Arrays, list[int]]:
        """Return the samples of tables, and the number of samples in each file."""
        if self.roles is None or self.num_classes is not None:
            raise ValueError(
                "Expected argument `target` to name the column of the targets of tables, and"
                f" `num_classes` to be None, but got {self.constructor_arguments['target']} and"
                f" {self.num_classes} for {folder}: set `data.dataset.target`."
            )
        tables: list[Any] = []
        row_numbers: list[str] = []
        for file, table in zip(files, self._read_tables(files, self.roles)):
            kind = f"{TABLE_KINDS[table_suffix(file.path)]} of samples"
            with report_read_errors(file.path, kind):  # of each file, for errors that name it
                table, dropped = drop_row_numbers(table, self.roles)
                build_arrays(table, self.roles, self.categories)
            tables.append(table)
            row_numbers += dropped
            columns, expected_columns = ({*table.column_names} for table in (tables[-1], tables[0]))
            if columns != expected_columns:
                raise ValueError(
                    f"Expected {file.path} to have the columns of {files[0].path.name} but got"
                    f" {', '.join(sorted(columns ^ expected_columns))} in only one of them."
                )
        warn_of_row_numbers(row_numbers, f"the files in {folder}")
        with report_read_errors(folder, "a folder of tables that fit together"):
            joined = join_tables(tables, self.roles)
            samples = build_arrays(joined, replace(self.roles, exclude=None), self.categories)
        self.preparation, self.columns = samples.preparation, samples.columns
        self._has_classes = samples.arrays.num_classes > 0
        return samples.arrays, [len(table) for table in tables]

    def _read_tables(self, files: Sequence[_ClientFile], roles: ColumnRoles) -> Iterator[Any]:
        """Yield the table of each file; names that are text in one file are text in all."""
        names, reals = roles.name_columns(), roles.real_columns(self.categories)
        tables = [read_table(file.path, self.delimiter, names, reals=reals) for file in files]
        texts = find_texts(tables, names)
        for file, table in zip(files, tables):
            is_text = {*find_texts([table], names)} >= {*texts} & {*table.column_names}
            if is_text:
                yield table
            else:
                columns = [name for name in texts if name in table.column_names]
                yield read_table(file.path, self.delimiter, names, columns, reals)


def _find_files(folder: Path) -> list[_ClientFile]:
    """Return the files of a folder, or of its folders train, val and test."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"Expected argument `folder` to be a folder but found none at {folder.absolute()}: set"
            " `data.dataset.folder`."
        )
    files = _list_files(folder, None)
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    parts = [
        file
        for path in folders
        if (part := PARTS.get(path.name.lower())) is not None
        for file in _list_files(path, part)
    ]
    if bool(files) == bool(parts):
        got = f"files both in it and in {parts[0].path.parent.name}" if files else "none"
        raise FileNotFoundError(
            f"Expected argument `folder` to be a folder with {_LAYOUT}, in it or in train and"
            f" test, but got {got} in {folder.absolute()}."
        )
    if parts:
        _warn_of_omitted(folders)
    files = sorted(
        files or parts, key=lambda file: (_natural_order(file.client), file.client, file.part)
    )
    suffixes = {file.path.suffix == ".npz" for file in files}
    if len(suffixes) > 1:
        raise ValueError(f"Expected {folder} to hold either .npz files or tables but got both.")
    counts = Counter((file.client, file.part) for file in files)
    for (client, _), count in counts.items():
        if count > 1:
            raise ValueError(
                f"Expected {folder} to hold one file for each client but got {count} for {client}."
            )
    if forms := find_two_forms([file.client for file in files]):
        raise ValueError(
            f"Expected {folder} to hold files with one name for each client but got {forms[0]!a}"
            f" and {forms[1]!a}, two forms of one name in Unicode: rename the files alike."
        )
    return files


def _warn_of_omitted(folders: Sequence[Path]) -> None:
    """Say that folders with files of clients are no official parts, by their names."""
    others = [
        path.name
        for path in folders
        if path.name.lower() not in PARTS
        and not path.name.startswith(".")
        and _list_files(path, None)
    ]
    if others:
        rank_zero_warn(
            f"pl_fed leaves out the files in {', '.join(others)} of {folders[0].parent}: name"
            " official parts train, val and test, or move these folders elsewhere."
        )


def _list_files(folder: Path, part: int | None) -> list[_ClientFile]:
    return [
        _ClientFile(path, _client_name(path), part)
        for path in folder.iterdir()
        if table_suffix(path) in (".npz", *TABLE_KINDS)
        and path.is_file()
        and not path.name.startswith(".")
    ]


def _client_name(path: Path) -> str:
    """Return the name of a file without the suffixes of its kind and compression."""
    suffix = re.escape(table_suffix(path))
    return re.sub(rf"{suffix}(\.\w+)?$", "", path.name, flags=re.IGNORECASE)


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers within names by their values.

    Example:
        >>> sorted(["b10", "b9", "a"], key=_natural_order)
        ['a', 'b9', 'b10']
    """
    return [
        (int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", name)
    ]


def _check_alike(
    path: Path, content: dict[str, Tensor], first: Path, expected: dict[str, Tensor]
) -> None:
    """Raise ``ValueError`` unless two files have the same arrays, shapes and types."""
    shapes, others = (
        ", ".join(f"{name} {describe(tensor)}" for name, tensor in tensors.items())
        for tensors in (content, expected)
    )
    if shapes != others:
        raise ValueError(
            f"Expected {path} to hold arrays like {first.name} ({others}) but got {shapes}."
        )
