"""Text that comes from data and errors, and goes to terminals, messages and spreadsheets."""

import csv
import io
import linecache
import re
from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import Any

_FORMULA = re.compile(r"[=+\-@\t\r']")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")


def escape_controls(text: str, encoding: str = "utf-8") -> str:
    r"""Return a text with escaped control characters, so that a terminal does not execute them.

    Args:
        text: The text.
        encoding: The encoding of the terminal. Letters outside it are escaped, too.

    Example:
        >>> print(escape_controls("a\x1b[31mb é"))
        a\x1b[31mb é
        >>> print(escape_controls("é", "ascii"))
        \xe9
    """
    if not text.isprintable():
        text = "".join(
            letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
            for letter in text
        )
    return text.encode(encoding, "backslashreplace").decode(encoding)


def csv_cell(text: str) -> str:
    """Return a text as a CSV cell that no spreadsheet reads as a formula.

    Texts that begin with ``=``, ``+``, ``-``, ``@``, a tab, a carriage return or an apostrophe get
    a leading apostrophe, unless they are numbers. Removing one leading apostrophe restores the
    text.

    Example:
        >>> csv_cell("=1+1"), csv_cell("-2"), csv_cell("'"), csv_cell("a=b")
        ("'=1+1", '-2', "''", 'a=b')
    """
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def format_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Return rows as the text of a CSV file; texts pass through :func:`csv_cell`.

    Args:
        rows: The values of each row by column; a row may have none of a column.
        columns: The columns; by default all, in the order in which rows first have them.

    Example:
        >>> print(format_csv([{"a": 1}, {"a": None, "b": "=x"}]), end="")
        a,b
        1,
        ,'=x
    """
    names = [*dict.fromkeys(name for row in rows for name in row)] if columns is None else columns
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        cells = [row.get(name, "") for name in names]
        writer.writerow([csv_cell(cell) if isinstance(cell, str) else cell for cell in cells])
    return file.getvalue()


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file by :func:`format_csv`, with the texts before :func:`csv_cell`.

    The mark of a spreadsheet at the beginning of a file in UTF-8 is no part of a column's name.

    Args:
        path: The file.

    Raises:
        OSError: If it cannot be read.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        return [
            {name: (text or "").removeprefix("'") for name, text in row.items() if name is not None}
            for row in csv.DictReader(file)
        ]


_LIBRARIES = {
    "contextlib",
    "torch",
    "functorch",
    "torchvision",
    "torchmetrics",
    "lightning",
    "pl_fed",
}


def find_code_line(error: BaseException) -> str:
    """Return the last line of a user's code in an error's traceback, with its place, or ``""``.

    Lines of torch, of Lightning, of torchmetrics and of pl_fed belong to no user.

    Args:
        error: An error that was caught.
    """
    place, found = error.__traceback__, ""
    while place is not None:
        frame, number = place.tb_frame, place.tb_lineno
        package = str(frame.f_globals.get("__name__")).split(".")[0]
        line = linecache.getline(frame.f_code.co_filename, number).strip()
        if line and package not in _LIBRARIES:
            found = f"{Path(frame.f_code.co_filename).name}:{number}: {line}"
        place = place.tb_next
    return found


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without a period; its type without a message.

    Example:
        >>> first_line(ValueError("It failed.")), first_line(ValueError())
        ('It failed', 'ValueError')
    """
    line, *_ = str(error).strip().splitlines() or [type(error).__name__]
    return line.rstrip(".")


def describe_error(error: BaseException) -> str:
    """Return the first line of an error's message, with the last line of a user's code if any.

    Args:
        error: An error that was caught.
    """
    line = find_code_line(error)
    return f"{first_line(error)} ({line})" if line else first_line(error)


def format_bound(number: float, digits: int = 4) -> str:
    """Return a number in text, rounded up, so that an upper bound stays one.

    Differences below 1e-9 of the number count as roundings of its own computation.

    Example:
        >>> format_bound(19.6412), format_bound(8.0), format_bound(0.1 + 0.2)
        ('19.65', '8', '0.3')
    """
    context = Context(prec=digits, rounding=ROUND_CEILING)
    rounded = context.create_decimal_from_float(number * (1 - 1e-9))
    return f"{float(rounded):.{digits}g}"


def quote(names: Sequence[str]) -> str:
    """Return the first three names in backticks, and the number of the others."""
    text = ", ".join(f"`{name}`" for name in names[:3])
    return text + (f" and {len(names) - 3} more" if len(names) > 3 else "")
