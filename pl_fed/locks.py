"""Locks on folders, which the system forgets when a process ends, however it does."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Lock a folder, and say whether nobody else has: another process, or another place of this.

    Where there are no locks (Windows, some file systems), nobody has.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield True
        return
    lock, alone = os.open(folder, os.O_RDONLY), True
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            alone = False
        except OSError:  # a file system without locks
            pass
        yield alone
    finally:
        os.close(lock)
