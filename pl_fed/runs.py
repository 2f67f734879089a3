"""A run's folder, and checkpoints that a kill cannot break."""

import contextlib
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from datetime import datetime
from io import BufferedWriter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from pl_fed.functional.arguments import check_writable
from pl_fed.locks import locked
from pl_fed.state import DiskRows, of_clients

_LARGE = 1 << 28  # bytes of a checkpoint that is mapped, and not read as a whole
_PIECE = 1 << 20
_LONGEST_PREFIX = 50  # letters, so that the name of a folder beside another is never too long
_HALF_WRITTEN = ".ckpt.tmp"
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
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= {_HALF_WRITTEN}


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns


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


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and moves it there, so that a kill leaves the old one.

    Lightning's own way goes through the temporary folder, from where a move is a copy if that lies
    on another disk, and through a second copy in memory. Here clients' states go from where they
    are to the file, piece by piece, and back: a large checkpoint is mapped when it is loaded.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(_HALF_WRITTEN)  # one for all, so that no kill leaves two
        with _Stream(temporary.open("wb", buffering=0)) as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint: in every process the one that the first is to load.

        Raises:
            ValueError: If it is not one that pl_fed wrote.
        """
        if dist.is_available() and dist.is_initialized():
            chosen = [str(path)]
            dist.broadcast_object_list(chosen)
            path = chosen[0]
        if Path(path).is_file():
            self._check(Path(path))
        if _is_large(Path(path)):
            kwargs.setdefault("map_location", "cpu")
            checkpoint: dict[str, Any] = torch.load(path, *args, mmap=True, **kwargs)
        else:
            checkpoint = super().load_checkpoint(path, *args, **kwargs)
        if not isinstance(checkpoint, dict) or "federation" not in checkpoint:
            raise ValueError(
                f"Expected argument `ckpt_path` to be a checkpoint of pl_fed but got {path}, which"
                " holds no federation."
            )
        return _with_own_memory(checkpoint)

    def _check(self, path: Path) -> None:
        """Refuse a file that is broken, by its checksums."""
        broken = path.name
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as file:
            broken = file.testzip() or ""
        if broken:
            raise ValueError(
                f"Expected argument `ckpt_path` to be a whole checkpoint but got {path}, which is"
                f" broken (in {broken}), or of another kind: take an earlier one, if there is any."
            )


def identity_in(path: str | Path | None) -> dict[str, Any]:
    """Return which federation a checkpoint is of; nothing if there is none, or it is broken."""
    if path is None or not zipfile.is_zipfile(path):
        return {}
    with contextlib.suppress(Exception):  # what is wrong with it is said when it is loaded
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        identity: dict[str, Any] = checkpoint["federation"]["identity"]
        return identity
    return {}


class RowsOf(AtomicCheckpointIO):
    """Reads of a checkpoint the states of some clients only: it may hold those of a million.

    Args:
        clients: Their ids, int64 [n].
    """

    def __init__(self, clients: Tensor) -> None:
        self.clients = clients

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint without the other clients' states."""
        checkpoint = super().load_checkpoint(path, *args, **kwargs)
        store = checkpoint["federation"]["store"]
        kept = of_clients(store, lambda ids: torch.isin(ids, self.clients))
        checkpoint["federation"]["store"] = kept
        return checkpoint

    def _check(self, path: Path) -> None:
        """Leave a large file unchecked, of which little is read."""
        if not _is_large(path):
            super()._check(path)


def _is_large(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > _LARGE and zipfile.is_zipfile(path)


def _with_own_memory(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Copy all but the clients' rows, so that the file is let go of when these are taken over."""
    store = checkpoint["federation"].pop("store", None)
    copied: dict[str, Any] = apply_to_collection(checkpoint, Tensor, torch.clone)
    copied["federation"]["store"] = store
    return copied


class _Stream(BufferedWriter):
    """A file that lets go of the memory of mapped rows when they are written."""

    def write(self, content: Any) -> int:
        written = super().write(content)
        if len(content) > _PIECE:
            DiskRows.give_back()
        return written
