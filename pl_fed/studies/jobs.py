"""Jobs of workers, and their outcomes, as lines of JSON between two processes."""

import json
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


_KINDS = {kind.__name__: kind for kind in (CheckJob, CheckOutcome, RunJob, RunOutcome)}
Job = CheckJob | RunJob
Outcome = CheckOutcome | RunOutcome


def encode(message: Job | Outcome) -> bytes:
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
