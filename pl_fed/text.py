"""Text that comes from data and errors, and goes to terminals, messages and spreadsheets."""

import re

_FORMULA = re.compile(r"[=+\-@\t\r']")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")


def printable(text: str, encoding: str = "utf-8") -> str:
    r"""Return a text without control characters, which a terminal would obey: they are escaped.

    Args:
        text: The text.
        encoding: That of the terminal. Letters that it lacks are escaped, too.

    Example:
        >>> print(printable("a\x1b[31mb é"))
        a\x1b[31mb é
        >>> print(printable("é", "ascii"))
        \xe9
    """
    if not text.isprintable():
        text = "".join(
            letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
            for letter in text
        )
    return text.encode(encoding, "backslashreplace").decode(encoding)


def csv_cell(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula, as a cell of a CSV.

    An apostrophe is put before texts that begin with ``=``, ``+``, ``-``, ``@``, a tab, a carriage
    return or an apostrophe, but for numbers. Whoever takes one leading apostrophe away has the text
    that was.

    Example:
        >>> csv_cell("=1+1"), csv_cell("-2"), csv_cell("'"), csv_cell("a=b")
        ("'=1+1", '-2', "''", 'a=b')
    """
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without a period; its type without a message.

    Example:
        >>> first_line(ValueError("It failed.")), first_line(ValueError())
        ('It failed', 'ValueError')
    """
    line, *_ = str(error).strip().splitlines() or [type(error).__name__]
    return line.rstrip(".")
