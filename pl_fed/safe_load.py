"""Files of ``torch.save`` whose content is tensors and values: loading one runs no code in it."""

import io
from collections import OrderedDict
from datetime import date, datetime, timedelta
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

try:
    from numpy._core import multiarray
except ImportError:  # NumPy 1
    from numpy.core import multiarray  # type: ignore[no-redef]

_CONTAINERS = (frozenset, range, slice)
_VALUES = (date, datetime, timedelta, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath)
_NUMPY = (
    np.ndarray,
    np.dtype,
    multiarray.scalar,
    multiarray._reconstruct,
    *[getattr(np.dtypes, name) for name in np.dtypes.__all__],
)
_ALLOWED: list[Any] = [*_CONTAINERS, *_VALUES, *_NUMPY]
_PLAIN = frozenset({bool, bytes, complex, float, int, str, type(None), Tensor, nn.Parameter})


def safe_load(file: Any, **options: Any) -> Any:
    """Return the content of a file, by ``torch.load`` with ``weights_only=True``.

    Beside tensors and Python's values, a file may hold numbers and arrays of NumPy, paths and
    times: schedules and callbacks often have them in their states.

    Args:
        file: A path or a file.
        **options: See ``torch.load``.

    Raises:
        pickle.UnpicklingError: If the file holds other objects, or is broken.
    """
    with torch.serialization.safe_globals(_ALLOWED):
        return torch.load(file, weights_only=True, **options)


def can_be_loaded(value: Any) -> bool:
    """Return whether :func:`safe_load` can load a value after ``torch.save``.

    Example:
        >>> can_be_loaded({"lr": np.float64(0.1)}), can_be_loaded({"net": nn.Identity()})
        (True, False)
    """
    if _is_plain(value):
        return True
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        safe_load(buffer)
    except Exception:  # errors of any class that the value holds
        return False
    return True


def _is_plain(value: Any) -> bool:
    """Return whether a value has only tensors and Python's values; most have, and need no trial."""
    if type(value) in (dict, OrderedDict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN
