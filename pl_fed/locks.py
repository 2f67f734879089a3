"""Locks of files and folders against other processes of one machine."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Lock a file or a folder, and yield whether this succeeded.

    It fails if another process holds the lock, or another block of this process. It always succeeds
    on systems without locks (Windows, some file systems).

    Args:
        path: An existing file or folder.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield True
        return
    lock, is_locked, owner = os.open(path, os.O_RDONLY), True, os.getpid()
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_locked = False
        except OSError:  # a file system without locks
            pass
        yield is_locked
    finally:
        if is_locked and os.getpid() == owner:  # processes forked meanwhile would hold it on
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
