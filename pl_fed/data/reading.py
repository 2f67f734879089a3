"""Files that are read, and what to say of one that is broken."""

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pl_fed.text import printable


@contextmanager
def report_read_errors(
    path: Path, kind: str, names: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Say whatever goes wrong while a file is read in one sentence that names the file.

    Args:
        path: The file.
        kind: What it should be.
        names: What the file calls an argument that an error names.

    Raises:
        ValueError: In the place of any exception.

    Example:
        >>> with report_read_errors(Path("a.json"), "a json file with `users`"):
        ...     {}["users"]
        Traceback (most recent call last):
            ...
        ValueError: Expected a.json to be a json file with `users` but got KeyError: 'users'.
    """
    try:
        yield
    except Exception as error:  # whatever a broken file makes its reader do
        text = (str(error).splitlines() or [""])[0].removesuffix(".")
        for argument, name in (names or {}).items():
            text = text.replace(f"`{argument}`", f"`{name}`")
        if not text.startswith("Expected "):
            what = f"{type(error).__name__}: {text}".removesuffix(": ")
            text = f"Expected {path} to be {kind} but got {what}"
        elif str(path) not in text:
            text = f"{text} in {path}"
        raise ValueError(f"{printable(text)}.") from error


def read_npz(
    path: Path, wanted: Sequence[str], optional: Sequence[str] = (), texts: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Return arrays of an ``.npz`` file by name, integers as int64, but for inputs ``x``.

    Floating point beyond float64, which torch lacks, becomes float64.

    Args:
        path: The file, which is there.
        wanted: Names of arrays that it must hold.
        optional: Names of arrays that it may hold.
        texts: Names of arrays that may be of strings instead of numbers.

    Raises:
        ValueError: If the file cannot be read, or an array is missing or does not hold numbers.
    """
    kind = "an .npz file of arrays of numbers"
    with report_read_errors(path, kind):
        if not zipfile.is_zipfile(path):
            raise ValueError(f"Expected {path} to be {kind} but got a broken one or another kind.")
        with np.load(path, allow_pickle=False) as file:
            for name in wanted:
                if name not in file.files:
                    found = ", ".join(file.files) or "none"
                    raise ValueError(f"Expected {path} to hold an array `{name}` but got {found}.")
            names = [name for name in (*wanted, *optional) if name in file.files]
            return {name: _checked(name, file[name], name in texts) for name in names}


def _checked(name: str, array: np.ndarray, text: bool) -> np.ndarray:
    if array.dtype.kind not in ("biufU" if text else "biuf"):
        raise TypeError(f"`{name}` is of type {array.dtype}.")
    if array.dtype.kind in "iu" and name != "x":
        if array.dtype == np.uint64 and array.size and array.max() >= 2**63:
            raise ValueError(f"Expected `{name}` to be integers below 2^63 but got {array.max()}")
        array = array.astype(np.int64)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        with np.errstate(over="ignore"):  # what becomes infinite is refused
            array = array.astype(np.float64)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(array)
