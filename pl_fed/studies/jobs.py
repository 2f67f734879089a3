"""Jobs of workers, and their outcomes, as lines of JSON between two processes."""

import json
import signal
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class CheckJob:
    """Check job: parse and check the config of a cell, and compare it with that of finished runs.

    Attributes:
        condition: The name of the condition that the cells share.
        arguments: The words of the command line, without a seed.
        folders: Folders of runs that should have this config but for their seeds: relative path of
            the cell → the seed.
        root: The folder of the study.
    """

    condition: str
    arguments: list[str]
    folders: dict[str, int] = field(default_factory=dict)
    root: str = ""


@dataclass(frozen=True)
class CheckOutcome:
    """Check outcome: the result of a check job.

    Attributes:
        error: The sentence that refuses the config; empty if it is valid.
        changes: The differences of the config, by folder; folders without any are left out.
    """

    error: str = ""
    changes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunJob:
    """Run job: run a cell, or resume its run.

    Attributes:
        root: The folder of the study.
        path: The folder of the cell, relative to ``root``.
        arguments: The words of the cell's command line.
        record: The content of ``cell.json``.
        keep_checkpoints: Whether the finished run keeps its checkpoints.
        restart: Whether to start from round 0 and move an earlier attempt aside.
    """

    root: str
    path: str
    arguments: list[str]
    record: dict[str, Any]
    keep_checkpoints: bool = False
    restart: bool = False


@dataclass(frozen=True)
class RunOutcome:
    """Run outcome: the result of a run job.

    Attributes:
        state: ``done``, ``diverged``, ``failed``, or ``running`` if another process has the cell.
        seconds: The time that the job took.
        error: The error of a failed run, in one line.
        note: A fact that the user should read, such as a folder moved aside.
    """

    state: str
    seconds: float = 0.0
    error: str = ""
    note: str = ""


@dataclass(frozen=True)
class Death:
    """Death: the end of the process of a job, before it had an outcome.

    Attributes:
        cause: The words after "its process", such as ``was killed by SIGKILL``.
        output: The end of the process's error output.
    """

    cause: str = "was killed"
    output: str = ""

    @classmethod
    def from_exit_code(cls, code: int) -> "Death":
        """Return the death of a process by its exit code: negative after a signal.

        Example:
            >>> Death.from_exit_code(-9).cause
            'was killed by SIGKILL, for lack of memory perhaps'
            >>> Death.from_exit_code(3).cause
            'ended with exit status 3'
        """
        if code >= 0:
            return cls(f"ended with exit status {code}")
        is_named = -code in {*signal.Signals}
        name = signal.Signals(-code).name if is_named else f"signal {-code}"
        memory = ", for lack of memory perhaps" if name == "SIGKILL" else ""
        return cls(f"was killed by {name}{memory}")


_KINDS = {kind.__name__: kind for kind in (CheckJob, CheckOutcome, RunJob, RunOutcome, Death)}
Job = CheckJob | RunJob
Outcome = CheckOutcome | RunOutcome


def encode(message: Job | Outcome | Death) -> bytes:
    """Return a message as one line."""
    return (json.dumps([type(message).__name__, asdict(message)]) + "\n").encode()


def decode(line: bytes) -> Any:
    """Return the message in a line.

    Example:
        >>> decode(encode(RunOutcome("done", 2.5)))
        RunOutcome(state='done', seconds=2.5, error='', note='')
    """
    kind, values = json.loads(line)
    return _KINDS[kind](**values)
