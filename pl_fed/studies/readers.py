"""Readers of values in a study: each fault is one sentence with the path of the value."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pl_fed.command.messages import shorten, suggest_name


class StudyError(ValueError):
    """Study error: a study that cannot run as it is written; the message is one sentence."""


def refuse(path: str, expected: str, got: object, remedy: str = "") -> NoReturn:
    """Raise the error of a value in a study.

    Args:
        path: The path of the value, such as ``axes.attack``.
        expected: A verb phrase, such as "be a mapping".
        got: The value.
        remedy: The advice.

    Raises:
        StudyError: Always.
    """
    advice = f": {remedy}" if remedy else ""
    raise StudyError(f"Expected argument `{path}` to {expected} but got {describe(got)}{advice}.")


def describe(value: object) -> str:
    """Return a value as text for a sentence.

    Example:
        >>> describe(None), describe({}), describe(True), describe([1])
        ('nothing', 'an empty mapping', 'true', '[1]')
    """
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return f"a mapping of {', '.join(map(str, value))}" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return f"[{shorten(', '.join(map(str, value)))}]" if value else "an empty list"
    return shorten(value)


def read_mapping(path: str, value: Any, keys: Sequence[str] = ()) -> dict[str, Any]:
    """Return a mapping with texts as keys.

    Args:
        path: The path of the value.
        value: The value; ``None`` is an empty mapping.
        keys: All keys that are possible; none allows every key.

    Raises:
        StudyError: If the value is no mapping, or a key is not possible.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        refuse(path or "study", "be a mapping", value)
    mapping = {str(key): item for key, item in value.items()}
    for key in mapping:
        if keys and key not in keys:
            raise StudyError(
                f"Expected argument `{path or 'study'}` to have only the keys {', '.join(keys)} but"
                f" got {shorten(key)}{suggest_name(key, keys)}."
            )
    return mapping


def read_text(path: str, value: Any) -> str:
    """Return a text that is not empty.

    Raises:
        StudyError: If the value is none.
    """
    if not isinstance(value, str) or not value.strip():
        refuse(path, "be a text", value)
    return str(value)


def read_flag(path: str, value: Any) -> bool:
    """Return a truth value.

    Raises:
        StudyError: If the value is none.
    """
    if not isinstance(value, bool):
        refuse(path, "be true or false", value)
    return bool(value)


def read_integer(path: str, value: Any, minimum: int) -> int:
    """Return an integer of at least ``minimum``.

    Raises:
        StudyError: If the value is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        refuse(path, f"be an integer of at least {minimum}", value)
    return int(value)


def read_list(path: str, value: Any) -> list[Any]:
    """Return a list; a single value that is no list is a list of one value.

    Raises:
        StudyError: If the list is empty.
    """
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not values or value is None:
        refuse(path, "have at least one value", value)
    return values
