"""Files that are replaced as a whole, and locks against other processes of one machine."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replace_file(path: Path, is_shared: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file, and move that file to its place at the end.

    A failure, for example on a full disk, leaves the file in its place as it was, and no temporary
    one; a killed process leaves a hidden temporary file beside it.

    Args:
        path: The place; its folder is made if it is missing.
        is_shared: Whether several processes may replace the file at a time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    process = f".{os.getpid()}" if is_shared else ""
    temporary = path.with_name(f".{path.name}{process}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


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


@contextlib.contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Lock a file against other processes, as soon as no other one holds its lock.

    Args:
        path: The file; it is made if it is missing, and its folder, too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    while True:
        with try_lock(path) as is_locked:
            if is_locked:
                yield
                return
        time.sleep(0.05)
