"""The folder of a run: its creation, its lock, and its last checkpoint."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning.pytorch.utilities import rank_zero_only

from pl_fed.arguments import check_writable
from pl_fed.files import try_lock as try_lock

_MAX_PREFIX_LETTERS = 50  # so that the name of a temporary folder is never too long

TEMPORARY_NAME = ".ckpt.tmp"
"""Name of an incomplete checkpoint; the same for all checkpoints, so that a kill leaves only one
incomplete file."""

LAST = "last"
"""The word for the newest run in place of a checkpoint's path."""

SUMMARY = "summary.json"
"""Name of the file with a run's results and the stage that they belong to."""

_LAST = re.compile(r"last(-v\d+)?\.ckpt")


def is_first_process() -> bool:
    """Return whether this process writes the files of its run; no trainer is necessary.

    A launcher (Lightning's own, torchrun, SLURM) sets the rank in the environment.
    """
    node = os.environ.get("NODE_RANK") or os.environ.get("GROUP_RANK") or "0"
    return int(rank_zero_only.rank or 0) == 0 and int(node) == 0  # type: ignore[attr-defined]


def new_folder(root: str | Path, argument: str = "default_root_dir") -> Path:
    """Make a new folder for a run under ``root``, with the time as its name.

    Args:
        root: The parent folder. It is made if it does not exist.
        argument: Name of the argument that sets ``root``, for the error message.

    Raises:
        ValueError: If ``root`` is not writable.
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
    """Return the newest ``last.ckpt`` of a run's folder; ``None`` if it has none.

    Lightning writes ``last-v1.ckpt`` beside ``last.ckpt`` if it does not recognise the latter as
    its own, for example if a fit began anew in the folder.
    """
    paths = Path(folder).glob("checkpoints/last*.ckpt")
    checkpoints = [path for path in paths if _LAST.fullmatch(path.name) and path.is_file()]
    return max(checkpoints, key=_modification_time, default=None)


def holds_run(folder: Path) -> bool:
    """Return whether a folder has files of a run that a new run would overwrite.

    Those of a run that was stopped before its first checkpoint may be overwritten.
    """
    has_results = (folder / "per_client.csv").is_file() or _read_stage(folder) == "fit"
    return has_results or last_checkpoint(folder) is not None


def holds_run_error(folder: Path) -> ValueError:
    """Return the exception for the folder of another run as that of a new run."""
    goes_on = 'set `ckpt_path` to "last" to go on with it, or ' if last_checkpoint(folder) else ""
    return ValueError(
        f"Expected argument `run_dir` to be a folder without a run but got {folder}, which"
        f" holds one: {goes_on}take another folder."
    )


@dataclass(frozen=True)
class StoredRun:
    """Stored run: a run as its folder shows it.

    Attributes:
        folder: The run's folder.
        checkpoint: Its last checkpoint; ``None`` if it was stopped before its first one.
        is_finished: Whether the run has ended with the test of its final models.
    """

    folder: Path
    checkpoint: Path | None
    is_finished: bool

    @classmethod
    def read(cls, folder: Path) -> "StoredRun | None":
        """Return the run in a folder; ``None`` if there is none that can continue or restart.

        A run without a checkpoint restarts. Its folder ``checkpoints`` holds nothing else: other
        checkpoints of a run may be of use.
        """
        checkpoint, saved = last_checkpoint(folder), folder / "checkpoints"
        is_tested = (folder / "per_client.csv").is_file()
        if checkpoint is None and (is_tested or not _is_empty(saved)):
            return None
        return cls(folder, checkpoint, is_tested and _read_stage(folder) == "test")

    @property
    def saved_at(self) -> int:
        """The time of the last checkpoint, or of the start of a run without one, in ns."""
        return _modification_time(self.checkpoint or self.folder / "checkpoints")


def find_runs(root: str | Path) -> list[StoredRun]:
    """Return the runs under ``root`` that can continue or restart, the last saved one first."""
    folders = [folder for folder in Path(root).glob("*") if folder.is_dir()]
    runs = [run for run in map(StoredRun.read, folders) if run is not None]
    return sorted(runs, key=lambda run: run.saved_at, reverse=True)


def last_run(root: str | Path) -> Path:
    """Return the folder of the run under ``root`` with the newest last checkpoint.

    Args:
        root: The parent folder of the runs.

    Raises:
        FileNotFoundError: If there is no such run.
    """
    for run in find_runs(root):
        if run.checkpoint is not None:
            return run.folder
    raise no_run_error(root)


def no_run_error(root: str | Path) -> FileNotFoundError:
    """Return the exception for a parent folder without a run that could continue."""
    return FileNotFoundError(
        "Expected argument `ckpt_path` = last to find a run with checkpoints/last.ckpt under"
        f" {Path(root).absolute()} but found none: the runs of a config lie under its"
        " trainer.default_root_dir, and write last.ckpt unless they are given a ModelCheckpoint"
        f" without `save_last: true`.{name_other_checkpoint(root)}"
    )


def name_other_checkpoint(root: str | Path) -> str:
    """Return a sentence with the newest checkpoint other than ``last.ckpt``; empty without any.

    A run that is killed between its first checkpoint and its first ``last.ckpt`` has such a one.

    Args:
        root: The folder of a run, or the parent folder of several.
    """
    folders = ("checkpoints/*.ckpt", "*/checkpoints/*.ckpt")
    paths = [path for pattern in folders for path in Path(root).glob(pattern) if path.is_file()]
    others = [path for path in paths if not _LAST.fullmatch(path.name)]
    newest = max(others, key=_modification_time, default=None)
    return f" The newest other checkpoint is {newest}: set `ckpt_path` to it." if newest else ""


def _is_empty(folder: Path) -> bool:
    """Return whether a folder exists and holds at most an incomplete checkpoint."""
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= {TEMPORARY_NAME}


def _read_stage(folder: Path) -> str | None:
    """Return the stage that a run has finished.

    A run that goes on has no summary, and a diverged one has finished none.
    """
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        return None if summary.get("diverged") else str(summary["stage"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _modification_time(path: Path) -> int:
    return path.stat().st_mtime_ns


@contextlib.contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Lock a run's folder, so that two fits do not write into each other's files.

    Raises:
        ValueError: If another process, or another fit of this process, holds the lock.
    """
    with try_lock(folder) as is_locked:
        if not is_locked:
            raise ValueError(
                "Expected the folder of a run that no other process writes into but got"
                f" {folder}: wait until the other process ends, or start a run without `ckpt_path`."
            )
        yield


class RunLock:
    """Run lock: excludes other processes from a run's folder.

    A process may enter the lock again while it holds it. Processes that write no files do not lock.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._times_entered = 0
        self._held = contextlib.ExitStack()

    def __enter__(self) -> None:
        """Take the lock, unless this process holds it already.

        Raises:
            ValueError: If another process holds the lock.
        """
        if not self._times_entered and is_first_process():
            self._held.enter_context(lock_run(self.folder))
        self._times_entered += 1

    def __exit__(self, *_: object) -> None:
        """Release the lock at the end of the outermost block."""
        self._times_entered -= 1
        if not self._times_entered:
            self._held.close()


@contextlib.contextmanager
def create_atomically(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, and move it to its place at the end; a failure leaves nothing.

    A killed process leaves a hidden folder with a unique name beside the place.

    Args:
        folder: The place: a path that does not exist, or an empty folder.
    """
    folder = folder.resolve()  # of the current folder, or of a link
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        folder.rmdir()
    with TemporaryDirectory(
        prefix=f".{folder.name[:_MAX_PREFIX_LETTERS]}.",
        suffix=".tmp",
        dir=folder.parent,
        ignore_cleanup_errors=True,
    ) as parent:
        temporary = Path(parent) / "made"
        temporary.mkdir()  # with the rights of a normal folder, unlike its parent
        yield temporary
        temporary.rename(folder)
