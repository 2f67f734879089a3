"""The structure of samples: their entries are matched by key, in any nesting, not by order."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any


def to_entries(value: Any) -> Any:
    """Return the fields of a dataclass as a dict, and any other value unchanged."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return value


def align(value: Any, like: Any, place: str, path: str = "") -> Any:
    """Return a sample, batch or tree with its keys in the order of another one.

    Keys of dicts, fields of dataclasses and names of named tuples are matched by name. Dataclasses
    become dicts.

    Args:
        value: The sample, batch or tree.
        like: One with the expected keys and order.
        place: The place of ``value`` in errors, such as ``"sample 3"``.
        path: The keys that lead to ``value``.

    Raises:
        ValueError: If a key is missing, or there is another one; with the key and the place.

    Example:
        >>> align({"b": 2, "a": {"d": 4, "c": 3}}, {"a": {"c": 0, "d": 0}, "b": 0}, "sample 1")
        {'a': {'c': 3, 'd': 4}, 'b': 2}
    """
    value, like = to_entries(value), to_entries(like)
    if isinstance(like, Mapping):
        if not isinstance(value, Mapping):
            raise _unlike(f"a dict of {', '.join(map(str, like))}", value, place, path)
        _check_keys(list(value), list(like), place, path)
        return {name: align(value[name], like[name], place, _join(path, name)) for name in like}
    if _is_named(like) and _is_named(value) and value._fields != like._fields:
        _check_keys(value._fields, like._fields, place, path)
        value = type(like)(*(getattr(value, name) for name in like._fields))
    if isinstance(like, tuple):
        if not isinstance(value, tuple) or len(value) != len(like):
            raise _unlike(f"a tuple of {len(like)} entries", value, place, path)
        names = getattr(like, "_fields", range(len(like)))
        pieces = [align(v, w, place, _join(path, n)) for n, v, w in zip(names, value, like)]
        return type(like)(*pieces) if _is_named(like) else tuple(pieces)
    if isinstance(value, Mapping | tuple):
        raise _unlike(f"one of type {type(like).__name__}", value, place, path)
    return value


def paths_of(tree: Any, path: str = "") -> list[str]:
    """Return the path of each tensor of a tree, in the order of :func:`pl_fed.trees.leaves`.

    Example:
        >>> paths_of({"a": (0, 0), "b": 0})
        ['a.0', 'a.1', 'b']
    """
    if isinstance(tree, Mapping):
        return [p for name, branch in tree.items() for p in paths_of(branch, _join(path, name))]
    if isinstance(tree, tuple | list):
        return [p for name, branch in enumerate(tree) for p in paths_of(branch, _join(path, name))]
    return [] if tree is None else [path]


def _check_keys(keys: Sequence[Any], expected: Sequence[Any], place: str, path: str) -> None:
    missing = [key for key in expected if key not in keys]
    added = [key for key in keys if key not in expected]
    if not missing and not added:
        return
    parts = [f"without {missing[0]!r}"] if missing else []
    parts += [f"with {added[0]!r}"] if added else []
    raise ValueError(
        f"Expected all samples to have the keys {', '.join(map(str, expected))}"
        f"{f' in entry {path!r}' if path else ''} but got one {' and '.join(parts)}, {place}: give"
        " all samples of all parts the same keys, or set `batches` to own"
    )


def _unlike(expected: str, value: Any, place: str, path: str) -> ValueError:
    return ValueError(
        f"Expected {f'entry {path!r} of ' if path else ''}all samples to be {expected} but got"
        f" {type(value).__name__}{f' of {len(value)}' if hasattr(value, '__len__') else ''},"
        f" {place}"
    )


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)
