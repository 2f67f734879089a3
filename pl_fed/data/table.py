"""Your own data from a CSV or parquet file."""

from pathlib import Path

from pl_fed.data.column_roles import ColumnRoles
from pl_fed.data.columns import (
    TABLE_KINDS,
    build_arrays,
    check_categories,
    check_delimiter,
    drop_row_numbers,
    find_shared_categories,
    read_table,
    table_suffix,
    warn_of_row_numbers,
)
from pl_fed.data.reading import report_read_errors
from pl_fed.data.source import Arrays, DataSource


class Table(DataSource):
    r"""Table: your own data from a CSV or parquet file with one sample per row.

    The first line of a CSV file names the columns. Inputs are a tensor [samples, inputs] of
    float64; numbers and booleans are taken as they are. With ``ids``, inputs are the tuple of that
    tensor and one of ids, int64 [samples, columns], and the net is called as ``net(numbers, ids)``;
    without other inputs, they are the ids alone. ``data.normalize: feature`` normalizes the
    numbers. Categories, classes and clients are numbered from 0 in the sorted order of their
    values. Missing categories have an id of their own, the last. Values are names as they are
    written: ``007`` and ``7`` differ, ``a`` and ``A``, too. Row numbers of pandas are no inputs.

    Reading needs the package pyarrow: ``pip install pl_fed[tables]``.

    Args:
        path: The path of the file: ``.csv``, ``.tsv`` (also with ``.gz``) or ``.parquet``.
        target: The column of the targets. A column of text, booleans or integers holds classes; one
            of real values is a target [samples, 1]. A list of columns holds several real-valued
            targets or labels, [samples, columns].
        client: The column of the owner of each sample: integers or text. No partitioner is needed
            then. It is an input, too, if ``inputs``, ``one_hot`` or ``ids`` name it.
        inputs: The columns of the inputs. ``None`` uses all columns without another role.
        exclude: Columns that are no inputs.
        one_hot: Columns of categories, each of which becomes an input of 0 and 1.
        ids: Columns of categories that become ids, for embeddings.
        split: The column of the official part of each sample: train, val or test, or 0, 1 or 2.
        classes: Whether the target holds classes. ``None`` infers it; set ``false`` for a
            regression of integers, such as counts.
        delimiter: What separates the values in a CSV file. ``None`` for a comma, or a tab in a
            ``.tsv`` file.
        categories: The values of the columns in ``one_hot`` and ``ids``, and of classes, by column
            and in the order of their ids. Other and missing values of inputs then share one more
            id, the last. ``None`` numbers the values of all clients, which
            ``federation.privacy`` refuses. It also takes those of the column in ``group``.
        group: The column of the group of each sample, such as a sex or an age band: evaluations
            then measure gaps between groups. It is an
            input only if ``inputs``, ``one_hot`` or ``ids`` name it.

    Raises:
        TypeError: If an argument is no name, or no list of names.
        ValueError: If a column has two roles, or the file is of another kind.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp(), "patients.csv")
        >>> _ = path.write_text("age,sex,ill,hospital\n44,f,no,Bern\n51,m,yes,Bern\n9,f,no,Uri")
        >>> arrays = Table(str(path), target="ill", client="hospital", one_hot=["sex"]).load()
        >>> arrays.inputs.tolist(), arrays.targets.tolist()
        ([[44.0, 1.0, 0.0], [51.0, 0.0, 1.0], [9.0, 1.0, 0.0]], [0, 1, 0])
        >>> arrays.client.tolist(), arrays.names
        ([0, 0, 1], ['Bern', 'Uri'])
    """

    def __init__(
        self,
        path: str,
        target: str | list[str],
        client: str | None = None,
        inputs: list[str] | None = None,
        exclude: list[str] | None = None,
        one_hot: list[str] | None = None,
        ids: list[str] | None = None,
        split: str | None = None,
        classes: bool | None = None,
        delimiter: str | None = None,
        categories: dict[str, list[str | int | float | bool]] | None = None,
        group: str | None = None,
    ) -> None:
        if table_suffix(Path(path)) not in TABLE_KINDS:
            raise ValueError(
                f"Expected argument `path` to be a .csv, .tsv or .parquet file but got {path}."
            )
        check_delimiter(delimiter)
        self.path = path
        self.delimiter = delimiter
        self.roles = ColumnRoles(
            target, client, inputs, exclude, one_hot, ids, split, classes, group
        )
        check_categories(categories, self.roles)
        self.categories = categories
        self._has_classes = classes is not False  # :meth:`load` reads it from the column

    def load(self) -> Arrays:
        """Return the samples of the file.

        Raises:
            FileNotFoundError: If there is no file at the path.
            ModuleNotFoundError: If the package pyarrow is not installed.
            ValueError: If the file is broken, a column is missing, or the values of a column do not
                fit its role.
        """
        path = Path(self.path).expanduser()
        kind = TABLE_KINDS[table_suffix(path)]
        if not path.is_file():
            raise FileNotFoundError(
                f"Expected argument `path` to be {kind} but found none at {path.absolute()}: set"
                " `data.dataset.path`."
            )
        names, reals = self.roles.name_columns(), self.roles.real_columns(self.categories)
        table = read_table(path, self.delimiter, names, reals=reals)
        with report_read_errors(path, f"{kind} of samples"):
            table, row_numbers = drop_row_numbers(table, self.roles)
            samples = build_arrays(table, self.roles, self.categories)
        warn_of_row_numbers(row_numbers, path.name)
        self.preparation, self.columns = samples.preparation, samples.columns
        self._has_classes = samples.arrays.num_classes > 0
        return samples.arrays

    def list_shared_quantities(self) -> dict[str, str]:
        """Return the columns of categories and classes without given values."""
        return find_shared_categories(self.roles, self.categories, self._has_classes)
