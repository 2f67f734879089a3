"""A run's folder: where it lies, its lock, whether a run may write into it, its last checkpoint."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning.pytorch.utilities import rank_zero_only

from pl_fed.arguments import check_writable

_LONGEST_PREFIX = 50  # letters, so that the name of a folder beside another is never too long

HALF_WRITTEN = ".ckpt.tmp"
"""The name of a checkpoint's file until it is complete: one for all, so that no kill leaves two."""

_LAST = re.compile(r"last(-v\d+)?\.ckpt")


def is_first_process() -> bool:
    """Return whether this is the process of a run that writes files, even before it has a trainer.

    A launcher (Lightning's own, torchrun, SLURM) says so in the environment.
    """
    node = os.environ.get("NODE_RANK") or os.environ.get("GROUP_RANK") or "0"
    return int(rank_zero_only.rank or 0) == 0 and int(node) == 0  # type: ignore[attr-defined]


def new_folder(root: str | Path, argument: str = "default_root_dir") -> Path:
    """Make a new folder for a run under ``root``, named by the time.

    Args:
        root: Where; it is made if need be.
        argument: What says so, for a sentence about it.

    Raises:
        ValueError: If ``root`` cannot be written.
    """
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    check_writable(**{argument: root})
    Path(root).mkdir(parents=True, exist_ok=True)
    for attempt in range(1, 1000):
        folder = Path(root) / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"Expected to make a new folder under {root} but {stamp} is taken.")


def last_checkpoint(folder: str | Path) -> Path | None:
    """Return the newest ``last.ckpt`` of a run's folder, if it has one.

    Lightning writes ``last-v1.ckpt`` beside it where it does not recognise the first as its own:
    in a run whose folder has been moved, for one.
    """
    found = Path(folder).glob("checkpoints/last*.ckpt")
    named = [path for path in found if _LAST.fullmatch(path.name) and path.is_file()]
    return max(named, key=_written, default=None)


def check_holds_no_run(folder: Path) -> None:
    """Refuse a folder in which a run has left what a new one would write over.

    Raises:
        ValueError: If it is one.
    """
    if last_checkpoint(folder) or (folder / "per_client.csv").is_file():
        raise ValueError(
            f"Expected argument `run_dir` to be a folder without a run but got {folder}, which"
            ' holds one: go on with it by `ckpt_path` = "last", or take another folder.'
        )


def last_run(root: str | Path, begun: Callable[[Path], bool] | None = None) -> Path:
    """Return the folder of the run under ``root`` whose last checkpoint is the newest.

    Args:
        root: Where runs lie.
        begun: Says which of those that were stopped before their first checkpoint it may be, if
            any.

    Raises:
        FileNotFoundError: If there is none.
    """
    found: dict[Path, Path] = {}
    for run in Path(root).glob("*"):
        path = last_checkpoint(run)
        stopped = not (run / "per_client.csv").is_file()  # a whole run has that of its test
        if path is None and begun and stopped and _is_empty(run / "checkpoints") and begun(run):
            path = run / "checkpoints"
        if path is not None:
            found[run] = path
    if not found:
        raise FileNotFoundError(
            "Expected argument `ckpt_path` = last to find a run with checkpoints/last.ckpt under"
            f" {Path(root).absolute()} but found none: the runs of a config lie under its"
            " trainer.default_root_dir, and write last.ckpt unless they are given a ModelCheckpoint"
            " without `save_last: true`."
        )
    return max(found, key=lambda run: _written(found[run]))


def _is_empty(folder: Path) -> bool:
    """Whether a folder is there, and has nothing in it but what a kill left half written."""
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= {HALF_WRITTEN}


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns


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


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other fits out of a run's folder: two would write into each other's files.

    Raises:
        ValueError: If another process, or another fit of this one, is at work there.
    """
    with locked(folder) as alone:
        if not alone:
            raise ValueError(
                "Expected the folder of a run that no other process writes into but got"
                f" {folder}: wait until that has ended, or begin a run without `ckpt_path`."
            )
        yield


class RunLock:
    """Keeps other processes out of a run's folder while it is held.

    It may be entered again while it is held. Processes that write no files hold nothing.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._times_entered = 0
        self._held = contextlib.ExitStack()

    def __enter__(self) -> None:
        """Take the lock, unless it is held already.

        Raises:
            ValueError: If another process holds it.
        """
        if not self._times_entered and is_first_process():
            self._held.enter_context(alone_in(self.folder))
        self._times_entered += 1

    def __exit__(self, *_: object) -> None:
        """Release the lock at the end of the outermost block."""
        self._times_entered -= 1
        if not self._times_entered:
            self._held.close()


@contextlib.contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """Give a folder that is moved to its place in the end, and of which a failure leaves nothing.

    A process that is killed leaves a hidden folder of a name of its own beside the place.

    Args:
        folder: Its place, where there is nothing, or an empty folder.
    """
    folder = folder.resolve()  # of the current folder, or of a link
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        folder.rmdir()
    names = {"prefix": f".{folder.name[:_LONGEST_PREFIX]}.", "suffix": ".tmp"}
    with TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True, **names) as beside:
        made = Path(beside) / "made"
        made.mkdir()  # with the rights of any new folder, unlike the one around it
        yield made
        made.rename(folder)
