"""The folder of a cell: its record, its state, and the results of its run."""

import contextlib
import errno
import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from pl_fed.files import replace_file, try_lock

RECORD = "cell.json"
"""Name of the file with a cell's labels, seed and last failure."""

LOCKS = ".locks"
"""Name of the folder with the files that processes lock, in that of a study."""

LOG = "log.txt"
"""Name of the file with the output of a cell's run."""

OTHER_ROUND = "another choice of the tested round"
"""The reason of a changed cell whose config is the same."""

_SUMMARY, _CONFIG = "summary.json", "config.yaml"
_MAX_BYTES = 255  # of the name of a file


class State(StrEnum):
    """State: how far a cell is."""

    DONE = "done"
    DIVERGED = "diverged"
    RECORDED = "recorded"
    RUNNING = "running"
    FAILED = "failed"
    STOPPED = "stopped"
    CHANGED = "changed"
    MISSING = "missing"

    @property
    def is_result(self) -> bool:
        """Whether the cell needs no further run: it is done, it diverged, or a table has it."""
        return self in (State.DONE, State.DIVERGED, State.RECORDED)


def find_sibling(folder: Path, ending: str) -> Path:
    """Return the folder beside a study's own that holds further runs of its cells.

    Args:
        folder: The study's folder.
        ending: ``aside`` for runs that a changed config replaced; ``again`` for repeated ones.
    """
    return folder.with_name(f"{folder.name}_{ending}")


@dataclass(frozen=True)
class CellRecord:
    """Cell record: the content of ``cell.json``.

    Attributes:
        study: The name of the study.
        cell: The name of the cell.
        values: Its labels by axis.
        seed: Its seed.
        digest: The hash of the inputs of its config.
        error: The error of its last attempt in one line; empty without one.
        best: The metric and the mode that choose the tested round; empty for the last round.
        tested: Whether the run is tested after its fit.
    """

    study: str
    cell: str
    values: Mapping[str, str]
    seed: int
    digest: str
    error: str = ""
    best: Sequence[str] = ()
    tested: bool = True


class CellFolder:
    """Cell folder: the folder of one cell's run.

    Args:
        root: The folder of the study.
        path: The folder of the cell, relative to ``root``.
    """

    def __init__(self, root: Path, path: str) -> None:
        self.root = root
        self.relative = path
        self.path = root / path

    def lock(self) -> contextlib.AbstractContextManager[bool]:
        """Lock the cell against other processes; yields whether this succeeded."""
        file = self._lock_file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        return try_lock(file)

    @property
    def _lock_file(self) -> Path:
        """The file that locks the cell; a hash names it if its path is longer than a name may be.

        The path of a trial has several folders.
        """
        name = self.relative.replace("/", ",")
        if len(name.encode()) > _MAX_BYTES:
            name = hashlib.sha256(name.encode()).hexdigest()
        return self.root / LOCKS / name

    @property
    def is_locked(self) -> bool:
        """Whether a process runs the cell."""
        file = self._lock_file
        if not file.exists():
            return False
        with try_lock(file) as is_free:
            return not is_free

    def read_record(self) -> CellRecord | None:
        """Return the record of the cell; ``None`` without a readable one."""
        values = read_json(self.path / RECORD)
        try:
            return CellRecord(**values) if values else None
        except TypeError:  # of another version
            return None

    def write_record(self, record: CellRecord) -> None:
        """Write the record of the cell, completely or not at all."""
        write_text(self.path / RECORD, json.dumps(asdict(record), indent=1) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """Return ``summary.json`` of the run; empty without a readable one."""
        return read_json(self.path / _SUMMARY)

    def read_state(self) -> State:
        """Return the state of the cell under any config."""
        if (state := self.read_result()) is not None:
            return state
        if self.is_locked:
            return State.RUNNING
        record = self.read_record()
        if record is not None and record.error:
            return State.FAILED
        return State.STOPPED if self.has_checkpoint else State.MISSING

    def read_result(self) -> State | None:
        """Return ``done`` or ``diverged``; ``None`` for a cell without a result."""
        summary = self.read_summary()
        if summary.get("stage") == "test":
            return State.DONE
        if summary.get("diverged"):
            return State.DIVERGED
        record = self.read_record() if summary.get("stage") == "fit" else None
        return State.DONE if record is not None and not record.tested else None

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run can resume."""
        return any((self.path / "checkpoints").glob("last*.ckpt"))

    @property
    def config(self) -> Path:
        """The file with the complete config of the run."""
        return self.path / _CONFIG

    def change_record(self, **changes: Any) -> None:
        """Change values of the record."""
        record = self.read_record()
        if record is not None and (changed := replace(record, **changes)) != record:
            self.write_record(changed)

    @property
    def aside(self) -> Path:
        """The folder of earlier runs of the cell, beside that of the study."""
        return find_sibling(self.root, "aside") / self.relative

    def move_aside(self) -> Path:
        """Move the folder beside that of the study, and return its new place.

        The place is on another file system if the study's folder is a link or a mounted one.
        """
        self.aside.mkdir(parents=True, exist_ok=True)
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        place = self.aside / stamp
        try:
            return self.path.rename(place)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        shutil.copytree(self.path, place, symlinks=True)
        # a kill must not leave a part of the run in its place
        shutil.rmtree(self.path.rename(self.path.with_name(f".{stamp}.tmp")))
        return place

    def clear(self) -> None:
        """Remove the files of a run without a checkpoint, except its log."""
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOG:
                path.unlink()

    def remove_checkpoints(self) -> None:
        """Remove the checkpoints of the run."""
        shutil.rmtree(self.path / "checkpoints", ignore_errors=True)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty without a readable one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_text(path: Path, text: str) -> None:
    """Write a file of a study, completely or not at all."""
    with replace_file(path, is_shared=True) as temporary:
        temporary.write_text(text, encoding="utf-8")


def iterate_numbers(
    value: Mapping[str, Any], prefix: str = "", reads_undefined: bool = False
) -> Iterator[tuple[str, float]]:
    """Yield the numbers in nested mappings by their paths with slashes.

    Args:
        value: The mapping.
        prefix: The beginning of the paths.
        reads_undefined: Whether ``None`` is NaN; otherwise it is left out.

    Example:
        >>> list(iterate_numbers({"test": {"loss": 0.5, "note": "x"}}))
        [('test/loss', 0.5)]
    """
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from iterate_numbers(item, f"{prefix}{name}/", reads_undefined)
        elif item is None and reads_undefined:
            yield f"{prefix}{name}", math.nan
        elif isinstance(item, int | float) and not isinstance(item, bool):
            yield f"{prefix}{name}", item
