"""The choice among the tests that are marked ``exhaustive``."""

import re
import zlib

import pytest


def is_chosen(test, choice):
    """Return whether an exhaustive test runs.

    Args:
        test: The id of the test.
        choice: ``"all"``, ``"none"``, or a part of all, such as ``"3/8"``: the third of eight. A
            test belongs to one of the eight by its id.

    Raises:
        ValueError: If there is no such choice.
    """
    if choice in ("all", "none"):
        return choice == "all"
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", choice)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(
            f"Expected `--exhaustive` to be all, none, or 3/8, say, but got {choice!r}."
        )
    part, parts = int(match[1]), int(match[2])
    return zlib.crc32(test.encode()) % parts == part - 1


def mark_others(values, *chosen):
    """Return parameters of a test: those that are not chosen are exhaustive.

    Args:
        values: The values of the parameter, or tuples of values of several.
        chosen: The values that `make test` runs, too.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in chosen else pytest.mark.exhaustive,
        )
        for value in values
    ]
