"""Fingerprints of the values that the code of modules keeps between calls."""

import random
import re
import struct
import types
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SCALARS = (bool, int, float, str, bytes, complex, type(None), Enum)
_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device)
LIBRARIES = frozenset(
    (
        *("torch", "torchvision", "torchmetrics", "lightning", "pytorch_lightning", "numpy"),
        *("transformers", "peft", "timm", "logging", "threading", "pl_fed", "builtins"),
    )
)
"""Packages whose classes and functions keep no values of a user in themselves."""

_UNREAD_OBJECTS = frozenset(("lightning", "pytorch_lightning", "pl_fed", "logging", "threading"))
"""Packages whose objects are not read, such as a trainer that a module refers to."""

_MAX_OBJECTS = 1 << 16  # objects in one attribute; the rest of a larger one counts as equal
_MAX_NUMBERS = 1 << 26  # numbers of a tensor that is read, unless a module has registered it
_CHUNK = 1 << 20  # numbers of a tensor that are read at once
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Contents:
    """Contents: the values that a container or an object holds.

    Attributes:
        kind: The class of the container, as text.
        names: The keys or attribute names of the values; empty for a sequence or a set.
        values: The values.
        is_ordered: Whether the order of the values counts.
    """

    kind: str
    names: tuple[Any, ...]
    values: tuple[Any, ...]
    is_ordered: bool = True


def contents(value: Any) -> Contents | None:
    """Return what a container, an object or a function holds; ``None`` for other values."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    attributes = attributes_of(value)
    if isinstance(value, Mapping):
        names = (*value.keys(), *attributes)
        return Contents(kind, names, (*value.values(), *attributes.values()))
    if isinstance(value, list | tuple | deque):
        return Contents(kind, tuple(attributes), (*value, *attributes.values()))
    if isinstance(value, set | frozenset):
        return Contents(kind, (), tuple(value), is_ordered=False)
    if isinstance(value, _CODE):
        return Contents(kind, (), _code_values(value))
    if isinstance(value, nn.Module):
        attributes = {name: v for name, v in attributes.items() if not name.startswith("_forward")}
    if attributes:
        return Contents(kind, tuple(attributes), tuple(attributes.values()))
    return None


_CODE = (partial, types.MethodType, types.FunctionType, types.GeneratorType)


def _code_values(value: Any) -> tuple[Any, ...]:
    """Return the values that a function, or a generator, keeps."""
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, types.FunctionType):
        return value.__qualname__, *function_values(value)
    frame = value.gi_frame
    return (-1,) if frame is None else (frame.f_lasti, *frame.f_locals.values())


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those of slots."""
    attributes = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                attributes[name] = getattr(value, name)
    return attributes


def function_values(function: types.FunctionType) -> tuple[Any, ...]:
    """Return the values that a function keeps: of its closure, its defaults and its attributes."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # an empty cell
            cells.append(None)
    return (*cells, function.__defaults__, function.__kwdefaults__, dict(vars(function)))


class Fingerprints:
    """Fingerprints: values by which a change of an attribute is seen, also deep inside of it.

    Equal contents have equal fingerprints, also in a copy of a module. Objects that hold no values,
    such as a class or a lock, are all equal.

    Args:
        registered: The name of each parameter, buffer and submodule of the modules, by its id.
            Fingerprints contain these names, and not the contents.
    """

    def __init__(self, registered: Mapping[int, str]) -> None:
        self._registered = registered
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # objects of the walk: their ids stay theirs

    def compute(self, value: Any) -> Hashable:
        """Return the fingerprint of a value."""
        self._seen, self._kept = {}, []
        return self._compute(value)

    def _compute(self, value: Any) -> Hashable:
        if isinstance(value, SCALARS):
            number = struct.pack("d", value) if isinstance(value, float) else value
            return type(value).__name__, number
        if id(value) in self._registered:
            return "registered", self._registered[id(value)]
        if isinstance(value, _OPAQUE):
            return "opaque", str(getattr(value, "__name__", value))
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        if len(self._seen) >= _MAX_OBJECTS:
            return ("unread",)
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        if isinstance(value, Tensor):
            return digest(value)
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                return "array", value.shape, tuple(self._compute(entry) for entry in value.ravel())
            return "array", str(value.dtype), digest(_as_bytes(value)), value.shape
        state = generator_state(value)
        return self._compute_contents(value) if state is None else ("generator", state)

    def _compute_contents(self, value: Any) -> Hashable:
        """Return the fingerprint of a container or an object."""
        if is_unread(value):
            return "unread", type(value).__qualname__
        held = contents(value)
        if held is None:
            return type(value).__qualname__, _ADDRESS.sub("", f"{_represent(value):.1000}")
        values = [self._compute(entry) for entry in held.values]
        names = [self._compute(name) for name in held.names]
        if not held.is_ordered:
            values.sort(key=repr)
        return held.kind, tuple(names), tuple(values)


def _represent(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # an object that cannot be printed
        return ""


def is_unread(value: Any) -> bool:
    """Return whether a value is an object whose class says that it holds no values of a module."""
    containers = (Mapping, list, tuple, set, frozenset, deque)
    return package_of(value) in _UNREAD_OBJECTS and not isinstance(value, containers)


def package_of(value: Any) -> str:
    """Return the package that defines the class of an object."""
    return type(value).__module__.partition(".")[0]


def is_by_user(value: Any) -> bool:
    """Return whether the class of a value belongs to a user, and not to pl_fed."""
    return package_of(value) != "pl_fed"


def read_values(value: Any) -> Hashable:
    """Return a fingerprint of all attributes of an object."""
    return Fingerprints({}).compute(dict(vars(value)))


def generator_state(value: Any) -> Hashable | None:
    """Return the state of a generator of random numbers; ``None`` for other values."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return digest(value.get_state())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    return None


def _as_bytes(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8).copy())


def digest(tensor: Tensor, reads_large: bool = False) -> Hashable:
    """Return type, shape and a 64-bit sum of a tensor's bits, weighted by their places.

    Args:
        tensor: The tensor.
        reads_large: Whether to read a tensor of any size; otherwise a very large one counts as
            equal to all of its shape.

    Example:
        >>> digest(torch.tensor([1.0, 2.0])) == digest(torch.tensor([2.0, 1.0]))
        False
    """
    with torch.no_grad():
        try:
            return _digest(tensor, reads_large)
        except (RuntimeError, NotImplementedError, TypeError):  # sparse, or of another transform
            return "tensor", str(tensor.dtype)


def _digest(tensor: Tensor, reads_large: bool) -> Hashable:
    flat = tensor.detach().contiguous().flatten()
    kind = str(tensor.dtype), tuple(tensor.shape)
    if not flat.numel() or (flat.numel() > _MAX_NUMBERS and not reads_large):
        return kind
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    elif flat.is_floating_point():
        flat = flat.view(_INTEGERS[flat.element_size()])
    total, begin = 0, 0
    for part in flat.split(_CHUNK):
        weights = 2 * torch.arange(begin, begin + len(part), device=part.device) + 1
        total += int((part.to(torch.int64) * weights).sum())
        begin += len(part)
    return *kind, total & (2**64 - 1)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
