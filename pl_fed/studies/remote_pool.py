"""The engines that run cells beyond this machine, and the common part of their pools."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pl_fed.studies.jobs import Death, Job, Outcome, decode, encode
from pl_fed.studies.pool import Pool, WorkerPool
from pl_fed.studies.readers import StudyError, read_mapping, refuse

ENGINES = ("ray", "slurm")


@dataclass(frozen=True)
class Remote:
    """Remote: an engine that runs cells on other machines, with its options.

    Attributes:
        engine: ``ray`` or ``slurm``.
        options: For Ray ``address``, ``cpus`` and ``gpus`` of a run (0.25 puts four runs on one
            card) and ``scratch``, a folder on each machine's own disk; for Slurm ``cluster``
            (``local`` runs the jobs here) and the parameters of submitit, such as
            ``slurm_partition``, ``timeout_min`` and ``gpus_per_node``.
    """

    engine: str
    options: Mapping[str, Any] = field(default_factory=dict)


def read_remote(path: str, value: Any) -> Remote | None:
    """Return the engine that a study file or the command line names; ``None`` without one.

    Args:
        path: The path of the value in the study.
        value: ``ray``, ``slurm``, or a mapping of one of them to its options.

    Raises:
        StudyError: If the value names none.
    """
    if value is None:
        return None
    content = {value: {}} if isinstance(value, str) else value
    engines = read_mapping(path, content, ENGINES)
    if len(engines) != 1:
        refuse(path, f"be one of {', '.join(ENGINES)}", value)
    ((engine, options),) = engines.items()
    allowed = ("address", "cpus", "gpus", "scratch") if engine == "ray" else ()
    settings = read_mapping(f"{path}.{engine}", options, allowed)
    scratch = settings.get("scratch")
    is_path = isinstance(scratch, str) and Path(scratch).is_absolute()
    if engine == "ray" and scratch is not None and not is_path:
        refuse(f"{path}.ray.scratch", "be the absolute path of a folder", scratch)
    return Remote(engine, settings)


@dataclass
class RemoteSlot:
    """Slot: a place for one run on another machine."""

    start: Callable[["RemoteSlot", Job], None]
    job: Job | None = None
    worker: Any = None
    runs: int = 0

    def give(self, job: Job) -> None:
        """Start a job."""
        self.job = job
        self.start(self, job)


class RemotePool(Pool):
    """Remote pool: runs cells on other machines, and checks configs on this one.

    Args:
        open_local: Starts workers on this machine.
    """

    def __init__(self, open_local: Callable[[], WorkerPool]) -> None:
        self._open_local = open_local
        self._slots: list[RemoteSlot] = []

    @property
    def idle(self) -> Sequence[RemoteSlot]:
        """The slots without a job."""
        return [slot for slot in self._slots if slot.job is None]

    @property
    def jobs(self) -> list[Job]:
        """The jobs that are done now."""
        return [slot.job for slot in self._slots if slot.job is not None]

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Outcome]]:
        """Do jobs on this machine."""
        with self._open_local() as local:
            yield from local.map(jobs)

    @abstractmethod
    def _collect(self, seconds: float) -> list[tuple[RemoteSlot, bytes | None]]:
        """Return the slots with an ended job and its outcome; ``None`` after a death."""

    def wait(self, seconds: float) -> list[tuple[Job, Outcome | Death]]:
        """Wait for the end of jobs."""
        ended: list[tuple[Job, Outcome | Death]] = []
        for slot, line in self._collect(seconds):
            job, slot.job = slot.job, None
            if job is not None:
                ended.append((job, Death() if line is None else decode(line)))
        return ended


def do_encoded_job(line: bytes) -> bytes:
    """Do a job in this process, as bytes."""
    from pl_fed.studies.worker import do_job

    return encode(do_job(decode(line)))


def import_engine(name: str) -> Any:
    """Return the package of an engine.

    Raises:
        StudyError: If it is not installed.
    """
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        extra = "ray" if name == "ray" else "slurm"
        raise StudyError(
            f"Expected {name} to be installed for `options.on: {extra}` but found none: install"
            f" pl_fed[{extra}]."
        ) from None
