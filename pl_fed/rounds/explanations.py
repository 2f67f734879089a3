"""Errors of users' code, with an explanation."""

from collections.abc import Callable, Mapping
from typing import Any


def call_or_explain(
    expected: str, call: Callable[[], Any], remedies: Mapping[str, str] | None = None
) -> Any:
    """Return the value of a function, or raise its error with an explanation.

    Args:
        expected: The beginning of the new message.
        call: The function.
        remedies: Endings of the new message, by words in the message of the error.

    Raises:
        ValueError: If the function fails.
    """
    try:
        return call()
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        for words, remedy in (remedies or {}).items():
            if words in reason:
                reason = f"{reason.rstrip('.')}{remedy}."
        raise ValueError(f"{expected} failed: {reason}") from error
