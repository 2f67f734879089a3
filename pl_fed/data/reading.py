"""Reading of files, with errors that name the broken file."""

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from pl_fed.text import escape_controls


@contextmanager
def report_read_errors(
    path: Path, kind: str, names: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Replace any error while reading a file by one sentence that names the file.

    Args:
        path: The file.
        kind: The kind of file, as the object of a sentence.
        names: Names of arguments in errors → names of the same things in the file.

    Raises:
        ValueError: Instead of any exception.

    Example:
        >>> with report_read_errors(Path("a.json"), "a json file with `users`"):
        ...     {}["users"]
        Traceback (most recent call last):
            ...
        ValueError: Expected a.json to be a json file with `users` but got KeyError: 'users'.
    """
    try:
        yield
    except Exception as error:  # a broken file makes its reader raise errors of any type
        text = (str(error).splitlines() or [""])[0].removesuffix(".")
        for argument, name in (names or {}).items():
            text = text.replace(f"`{argument}`", f"`{name}`")
        if not text.startswith("Expected "):
            reason = f"{type(error).__name__}: {text}".removesuffix(": ")
            text = f"Expected {path} to be {kind} but got {reason}"
        elif str(path) not in text:
            text = f"{text} in {path}"
        raise ValueError(f"{escape_controls(text)}.") from error


def read_npz(
    path: Path, required: Sequence[str], optional: Sequence[str] = (), texts: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Return the arrays of an ``.npz`` file by name.

    A warning names an array that is left out and has almost the name of an optional one. Integers
    become int64, except in the inputs ``x``. Floating-point types larger than float64 become
    float64, because torch lacks them.

    Args:
        path: An existing file.
        required: Names of the arrays that the file must hold.
        optional: Names of the arrays that the file may hold.
        texts: Names of the arrays that may hold strings instead of numbers.

    Raises:
        ValueError: If the file cannot be read, or an array is missing or does not hold numbers.
    """
    kind = "an .npz file of arrays of numbers"
    with report_read_errors(path, kind):
        if not zipfile.is_zipfile(path):
            raise ValueError(f"Expected {path} to be {kind} but got a broken one or another kind.")
        with np.load(path, allow_pickle=False) as file:
            for name in required:
                if name not in file.files:
                    arrays = ", ".join(file.files) or "none"
                    raise ValueError(f"Expected {path} to hold an array `{name}` but got {arrays}.")
            names = [name for name in (*required, *optional) if name in file.files]
            warn_of_similar_names(file.files, names, optional, path)
            return {name: _convert(name, file[name], name in texts) for name in names}


def warn_of_similar_names(
    arrays: Sequence[str], names: Sequence[str], optional: Sequence[str], path: Path
) -> None:
    """Say that an array is left out and has almost the name of an optional one that is missing.

    Args:
        arrays: The names of all arrays.
        names: The names of the arrays that are read.
        optional: The names of the arrays that may be missing.
        path: The file or folder of the arrays.
    """
    missing = [name for name in optional if name not in names]
    for name in arrays:
        if name not in names and (similar := get_close_matches(name, missing, n=1)):
            rank_zero_warn(
                f"pl_fed does not read the array `{name}` of {path}: name it `{similar[0]}` if it"
                " is meant as that."
            )


def read_npy(path: Path, name: str, allow_text: bool = False) -> np.ndarray:
    """Return the array of an ``.npy`` file; integers become int64, except in the inputs ``x``.

    Args:
        path: An existing file.
        name: The name of the array in errors.
        allow_text: Whether the array may hold strings instead of numbers.

    Raises:
        ValueError: If the file cannot be read, or does not hold numbers.
    """
    with report_read_errors(path, "an .npy file of numbers"):
        array = np.load(path, allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise TypeError("it is an archive of several arrays")
        return _convert(name, array, allow_text)


def _convert(name: str, array: np.ndarray, allow_text: bool) -> np.ndarray:
    """Return an array with a type and a memory layout that torch takes."""
    if array.dtype.kind not in ("biufU" if allow_text else "biuf"):
        raise TypeError(f"`{name}` is of type {array.dtype}.")
    if array.dtype.kind in "iu" and name != "x":
        if array.dtype == np.uint64 and array.size and array.max() >= 2**63:
            raise ValueError(f"Expected `{name}` to be integers below 2^63 but got {array.max()}")
        array = array.astype(np.int64)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        with np.errstate(over="ignore"):  # Arrays refuses the infinite results
            array = array.astype(np.float64)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(array)
