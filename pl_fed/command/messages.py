"""Sentences of the command line: parts of error messages, and errors of classes and files."""

import difflib
import errno
import inspect
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

_Object = TypeVar("_Object")
SUBCOMMANDS = (
    *("fit", "validate", "test", "predict"),
    *("study", "partition", "report", "export", "list"),
)
_MAX_NAMES = 12  # most names in a sentence
_MAX_LENGTH = 160  # most characters of a value
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_INTERNAL = re.compile(  # internals of jsonargparse, which no message should show
    r"Namespace\(|NestedArg\(|Parser key|Does not validate|Problem with given|Problems parsing|"
    r"Subclass types|<class '|<function|typing\.|Got value:|Given value|object at 0x|Unable to load"
)


def summarize(message: str) -> str:
    r"""Summarize an error message whose fault is not found otherwise.

    A sentence of pl_fed in a tree of jsonargparse stays unchanged. Other messages become one line;
    if jsonargparse shows internals in it, only the argument and the plain part of the message.

    Example:
        >>> print(summarize("Something\n  went wrong"))
        Something went wrong
    """
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    plain = [line for line in lines if line and not _INTERNAL.search(line)]
    for line in [lines[0], *plain]:  # a sentence may quote an error of the user's code with a class
        if line.startswith("Expected ") and ("`" in line or " be a class that can be made" in line):
            return line
    if device := re.match(r"No supported gpu backend|`(\w+)` can not run on your system", message):
        name = {None: "gpu", "CUDAAccelerator": "cuda"}.get(device[1])
        got = f"{name}: torch finds no GPU that it can use" if name else device[1]
        return f"Expected argument `trainer.accelerator` to be available here but got {got}."
    if cards := re.match(r"You requested gpu: (\[.*\])\s+But your machine only has: (.*)", message):
        return (
            f"Expected argument `trainer.devices` to name GPUs of this machine, {cards[2]}, but got"
            f" {cards[1]}."
        )
    if share := re.match(r"You requested to check (\S+) of the `\w+_dataloader`", message):
        return (
            "Expected argument `trainer.overfit_batches`, or the `limit_<stage>_batches` in use, to"
            " be a number of batches, or a share with at least one batch of clients, but got"
            f" {share[1]}: set, for example, 1.0."
        )
    if not _INTERNAL.search(message):
        return " ".join(message.split())
    plain = [line for line in plain if line != "Errors:"]
    value = re.search(r"^\s*Given value: (None|True|False|[-+.\w]+)$", message, flags=re.MULTILINE)
    if value and not plain:
        plain = [value[1]]
    keys = dict.fromkeys(re.findall(r'Parser key "(.+?)":', message))
    argument = f"argument `{'.'.join(keys)}` to be as --help says" if keys else "a valid config"
    return f"Expected {argument} but got: {shorten(plain[-1].rstrip('.')) if plain else 'another'}."


def escape_invisible(text: str) -> str:
    r"""Return a text with escaped control and invisible characters, except line breaks.

    Example:
        >>> print(escape_invisible("é \x1b[31m"))
        é \x1b[31m
    """
    return "".join(
        character if character.isprintable() or character == "\n" else _escape(character)
        for character in text
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def shorten(value: Any) -> str:
    """Return a value as text of a limited length."""
    text = str(value)
    if not text.strip():
        return repr(text)
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}…"


def make_object(class_type: type[_Object], *args: Any, **kwargs: Any) -> _Object:
    """Make an object of a class in the config, or call one that pl_fed gives arguments.

    Raises:
        ValueError: If its constructor fails with another error than a sentence of its own.
    """
    try:
        return class_type(*args, **kwargs)
    except Exception as error:
        if args or str(error).startswith("Expected"):
            raise
        *_, (frame, line) = [*traceback.walk_tb(error.__traceback__)][:2]
        missing = " and ".join(  # jsonargparse passes None for a missing argument without a type
            f"`{name}`"
            for name, parameter in inspect.signature(class_type).parameters.items()
            if parameter.default is parameter.empty and kwargs.get(name, class_type) is None
        )
        raise ValueError(
            f"Expected {class_type.__module__}.{class_type.__qualname__} to be a class that can be"
            f" made but got {type(error).__name__}: {' '.join(str(error).split())}"
            f" ({Path(frame.f_code.co_filename).name}, line {line})"
            f"{f': {missing} was not given' if missing else ''}."
        ) from error


def describe_file_error(error: BaseException) -> str:
    """Describe an operating system error about a file or folder; else return an empty text.

    A file that cannot move is described by its place: its own name is a temporary one.

    Example:
        >>> describe_file_error(PermissionError(13, "Permission denied", "runs/a"))
        'Expected to read or write runs/a but got: Permission denied.'
    """
    if not isinstance(error, OSError) or not error.filename or not error.strerror:
        return ""
    place = error.filename2 or error.filename
    return f"Expected to read or write {place} but got: {error.strerror}."


@contextmanager
def explain_full_disk(files: str, remedy: str) -> Iterator[None]:
    """Explain the error of a full disk within the context: see :func:`describe_full_disk`.

    Raises:
        OSError: The error of the system, if it had another cause.
    """
    try:
        yield
    except OSError as error:
        if text := describe_full_disk(error, files, remedy):
            raise OSError(text) from error
        raise


def describe_full_disk(error: BaseException, files: str, remedy: str) -> str:
    """Describe an error of a full disk; else return an empty text.

    Args:
        error: The error.
        files: The files that need space.
        remedy: What to do after space was made.

    Example:
        >>> full = OSError(errno.ENOSPC, "No space left on device")
        >>> print(describe_full_disk(full, "run/", "retry"))
        Expected disk space for run/ but got: No space left on device: free disk space and retry.
    """
    if not isinstance(error, OSError) or error.errno not in _DISK_FULL:
        return ""
    return (
        f"Expected disk space for {files} but got: {error.strerror}: free disk space and {remedy}."
    )


def suggest_name(name: str, names: Sequence[str]) -> str:
    """Suggest the most similar name in parentheses; empty if none is similar."""
    similar = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {similar[0]}?)" if similar else ""


def list_names(names: list[str]) -> str:
    """List names in parentheses; empty if there are none or too many."""
    return f" (there are: {', '.join(names)})" if 0 < len(names) <= _MAX_NAMES else ""


def first_refusal(text: str) -> str:
    """Return the sentence in the error output of a command line, without its hint."""
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    return lines[0].removeprefix("error: ") if lines else summarize(text)
