"""Runs on machines without a shared file system: each in a local folder. Its files come home.

Home is the folder of the study, on the machine that starts it. A parcel is the content of a run's
folder. It goes out before a run, comes home with each new checkpoint, and at the end. So a run that
is killed resumes on any machine.
"""

import hashlib
import io
import os
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from pl_fed.run_folder import last_checkpoint
from pl_fed.studies.cell_folder import CellFolder
from pl_fed.studies.jobs import RunJob, RunOutcome
from pl_fed.studies.readers import StudyError
from pl_fed.text import first_line

_SUMMARY = "summary.json"  # makes a cell a result, so it is written last
_TEMPORARY = ".tmp"
_LAYER = "--config"


def pack(folder: Path) -> bytes:
    """Return the files of a folder as a parcel; empty if there is no folder.

    The run may go on. Checkpoints come first: so other files are as new as they are, as after a
    kill.
    """
    if not folder.is_dir():
        return b""
    content = io.BytesIO()
    with tarfile.TarFile(fileobj=content, mode="w") as archive:
        for path in sorted(folder.rglob("*"), key=lambda path: (path.suffix != ".ckpt", path)):
            if path.name.endswith(_TEMPORARY) or not path.is_file() or path.is_symlink():
                continue
            with suppress(FileNotFoundError):  # the run has removed it
                data = path.read_bytes()
                entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
                entry.size, entry.mtime = len(data), int(path.stat().st_mtime)
                archive.addfile(entry, io.BytesIO(data))
    return content.getvalue()


def unpack(parcel: bytes, folder: Path, removes: bool = True) -> None:
    """Write the files of a parcel to a folder, each completely or not at all.

    Checkpoints are written after other files, and the summary last. An empty parcel changes
    nothing.

    Args:
        parcel: The parcel.
        folder: The folder; created if missing.
        removes: Whether to remove other files of the folder.
    """
    if not parcel:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.TarFile(fileobj=io.BytesIO(parcel)) as archive:
        entries = {entry.name: entry for entry in archive.getmembers()}
        for name in sorted(entries, key=lambda name: (name == _SUMMARY, name.endswith(".ckpt"))):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}{_TEMPORARY}")
            if (source := archive.extractfile(entries[name])) is not None:
                temporary.write_bytes(source.read())
                os.utime(temporary, (entries[name].mtime, entries[name].mtime))
                temporary.replace(path)
    for path in sorted(folder.rglob("*"), reverse=True) if removes else ():
        if path.is_file() and path.relative_to(folder).as_posix() not in entries:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def read_layers(words: Sequence[str]) -> dict[str, str]:
    """Return the texts of the layers of a command line that are files, by their paths."""
    paths = [path for name, path in pairwise(words) if name == _LAYER]
    return {path: Path(path).read_text(encoding="utf-8") for path in paths if Path(path).is_file()}


def run_in_scratch(
    job: RunJob,
    parcel: bytes,
    layers: Mapping[str, str],
    scratch: Path,
    send: Callable[[bytes], object],
    check_seconds: float,
) -> tuple[RunOutcome, bytes, bytes]:
    """Run a cell in a local folder, and remove the folder at the end.

    Args:
        job: The cell, in its home.
        parcel: The files of the cell at home.
        layers: The texts of the layers that are files at home, by their paths.
        scratch: The local folder of all studies; the same on each machine, because checkpoints
            name the folder of their run.
        send: Sends home the parcel of the run with a new checkpoint.
        check_seconds: The time between two looks for a new checkpoint.

    Returns:
        The outcome, the parcel of the cell, and that of runs moved aside.

    Raises:
        StudyError: If the folder cannot be written.
    """
    from pl_fed.studies.cell_run import run_cell

    home = Path(job.root)
    digest = hashlib.sha256(job.root.encode()).hexdigest()[:8]
    study = scratch / f"pl_fed-{digest}"
    folder = CellFolder(study / home.name, job.path)
    try:
        for path in (folder.path, folder.aside):  # of a run that was killed here
            shutil.rmtree(path, ignore_errors=True)
        unpack(parcel, folder.path)
        words = _place_layers(job.arguments, layers, study / "layers" / job.path)
    except OSError as error:
        raise StudyError(
            "Expected argument `options.on.ray.scratch` to be a folder that each machine can write"
            f" but got {scratch}: {first_line(error)}."
        ) from error
    with _send_checkpoints(folder.path, send, check_seconds):
        outcome = run_cell(replace(job, root=str(folder.root), arguments=words))
    note = outcome.note.replace(str(folder.root), str(home))
    parcels = pack(folder.path), pack(folder.aside)
    for path in (folder.path, folder.aside, study / "layers" / job.path):
        shutil.rmtree(path, ignore_errors=True)
    return replace(outcome, note=note), *parcels


def _place_layers(words: Sequence[str], layers: Mapping[str, str], folder: Path) -> list[str]:
    """Write layers to a folder, and return the command line with their new paths."""
    places = {}
    for number, (path, text) in enumerate(layers.items()):
        places[path] = folder / f"{number}-{Path(path).name}"
        folder.mkdir(parents=True, exist_ok=True)
        places[path].write_text(text, encoding="utf-8")
    return [
        str(places[word]) if before == _LAYER and word in places else word
        for before, word in zip(["", *words], words)
    ]


@contextmanager
def _send_checkpoints(
    folder: Path, send: Callable[[bytes], object], seconds: float
) -> Iterator[None]:
    """Send a parcel of a folder for each new checkpoint that a look finds during the block."""
    has_ended = threading.Event()

    def watch() -> None:
        sent = _find_time(folder)
        while not has_ended.wait(seconds):
            saved = _find_time(folder)
            if saved not in (sent, 0):
                send(pack(folder))
                sent = saved

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def _find_time(folder: Path) -> int:
    """Return the time of the newest checkpoint, in nanoseconds; 0 without one."""
    path = last_checkpoint(folder)
    with suppress(FileNotFoundError):
        return 0 if path is None else path.stat().st_mtime_ns
    return 0
