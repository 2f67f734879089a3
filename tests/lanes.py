"""The choice among the tests that are marked ``exhaustive``."""

import re
import zlib


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
