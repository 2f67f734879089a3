"""Standard streams: a run does not end because nobody reads its output."""

import io
import os
import sys
from typing import Any


class _UnreadOutput(io.RawIOBase):
    """Unread output: writes to a file descriptor, and to nowhere after its reader has ended.

    Args:
        descriptor: The file descriptor; it stays open.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, content: Any) -> int:
        try:
            return os.write(self._descriptor, content)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._descriptor)  # also for libraries in C and other processes
            os.close(nowhere)
            return os.write(self._descriptor, content)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


def open_standard_streams() -> None:
    """Open closed standard streams, and keep output streams usable after their reader has ended.

    A closed stream (``2>&-``) is ``None`` in Python, and the next opened file gets its descriptor:
    output of libraries in C would go into that file. After the end of a reader
    (``| head -1``) every output would be an error, and rich ends the process with a status.
    """
    if os.name != "posix":  # a console of Windows is no file descriptor
        return
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor: this one
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = _keep_usable(sys.stdout, 1)
    sys.stderr = _keep_usable(sys.stderr, 2)


def _keep_usable(stream: Any, descriptor: int) -> io.TextIOWrapper:
    """Return a copy of a text stream that writes to nowhere after its reader's end.

    Characters that a strict stream cannot encode, such as ε in ASCII, are escaped.
    """
    if stream is not None:
        stream.flush()
    errors = getattr(stream, "errors", "strict")
    return io.TextIOWrapper(
        io.BufferedWriter(_UnreadOutput(descriptor)),
        encoding=getattr(stream, "encoding", "utf-8"),
        errors="backslashreplace" if errors == "strict" else errors,
        line_buffering=descriptor == 2 or os.isatty(descriptor),
        write_through=getattr(stream, "write_through", False),
    )
