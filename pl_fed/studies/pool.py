"""Worker processes of a study, and the jobs that they do."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import IO, Protocol

from pl_fed.studies.cards import VISIBLE_CARDS
from pl_fed.studies.jobs import Death, Job, Outcome, decode, encode
from pl_fed.studies.worker import READY

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment variables that give a process one thread."""
_MAX_STARTS = 3  # of a worker that dies before it is ready
_TAIL = 2_000  # characters of a worker's error output


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Worker:
    """Worker: one process with one thread that does jobs, see :mod:`pl_fed.studies.worker`.

    Args:
        limit: The number of runs of a fork; then a fresh one takes its place.
        words: The command line of a cell.
        card: The graphics card of its runs; ``None`` leaves them those of this process.
    """

    def __init__(self, limit: int, words: Sequence[str], card: str | None = None) -> None:
        self._command = [sys.executable, "-m", "pl_fed.studies.worker", str(limit), *words]
        self._settings = dict(ONE_THREAD) if card is None else {**ONE_THREAD, VISIBLE_CARDS: card}
        self.job: Job | None = None
        self.is_ready = False
        self._starts = 0
        self._start()

    def _start(self) -> None:
        """Start the process in a session of its own, so that Ctrl-C reaches this process alone."""
        self._starts += 1
        self.is_ready = False
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        path = os.pathsep.join(dict.fromkeys(filter(None, sys.path)))
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            env={**os.environ, **self._settings, "PYTHONPATH": path},
            start_new_session=True,
        )

    @property
    def output(self) -> IO[bytes]:
        """The stream of outcomes."""
        stream = self._process.stdout
        if stream is None:
            raise RuntimeError("a worker has an output")
        return stream

    @property
    def is_idle(self) -> bool:
        """Whether the worker can take a job."""
        return self.is_ready and self.job is None

    def give(self, job: Job) -> None:
        """Send a job to the worker."""
        self.job = job
        stream = self._process.stdin
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):  # its death is noticed at its output
                stream.write(encode(job))

    def read(self) -> tuple[Job, Outcome | Death] | None:
        """Read the next line of the worker.

        Returns:
            The job and its outcome; ``None`` for a line that ends no job.

        Raises:
            RuntimeError: If the worker cannot start.
        """
        line = self.output.readline()
        if line == READY:
            self.is_ready, self._starts = True, 0
            return None
        job, self.job = self.job, None
        outcome = decode(line) if line else None
        if isinstance(outcome, Death):
            outcome = replace(outcome, output=self._read_errors())
        elif outcome is None:
            outcome = self._replace()
        return None if job is None else (job, outcome)

    def _replace(self) -> Death:
        """Start another process in place of a dead one, and return its death."""
        self.kill()
        text = self._read_errors()
        if self._starts >= _MAX_STARTS:
            raise RuntimeError(f"a worker of the study cannot start:\n{text}")
        death = replace(Death.from_exit_code(self._process.returncode), output=text)
        self._errors.close()
        self._start()
        return death

    def _read_errors(self) -> str:
        """Return the end of the process's error output."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-_TAIL:]

    def kill(self) -> None:
        """End the process and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class Slot(Protocol):
    """Slot: a place for one job at a time."""

    job: Job | None

    def give(self, job: Job) -> None:
        """Start a job."""


class Pool(ABC):
    """Pool: does jobs side by side; a context that ends its processes."""

    def __enter__(self) -> "Pool":
        """Return the pool."""
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None:
        """End all processes."""

    @property
    @abstractmethod
    def idle(self) -> Sequence[Slot]:
        """The slots that can take a job."""

    @property
    @abstractmethod
    def jobs(self) -> list[Job]:
        """The jobs that are done now."""

    @abstractmethod
    def wait(self, seconds: float) -> list[tuple[Job, Outcome | Death]]:
        """Wait for the end of jobs.

        Args:
            seconds: The longest time to wait.

        Returns:
            Ended jobs and their outcomes, or the deaths of their processes.
        """

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Outcome]]:
        """Do jobs, and yield each with its outcome; after the death of a process, once more.

        Raises:
            RuntimeError: If a process dies twice with the same job.
        """
        waiting, deaths = list(jobs), []
        while waiting or self.jobs:
            for slot in self.idle[: len(waiting)]:
                slot.give(waiting.pop(0))
            for job, outcome in self.wait(1.0):
                if not isinstance(outcome, Death):
                    yield job, outcome
                elif job in deaths:
                    raise RuntimeError(
                        f"a worker of the study {outcome.cause} twice with {job}:\n{outcome.output}"
                    )
                else:
                    deaths.append(job)
                    waiting.append(job)


class WorkerPool(Pool):
    """Worker pool: some workers on this machine, which are killed at its end.

    Args:
        count: The number of workers.
        limit: The number of runs of a fork; then a fresh one takes its place.
        words: The command line of a cell: workers import its loggers, too.
        cards: The graphics cards; workers take them in turn. Without any, they have all cards of
            this process.
    """

    def __init__(
        self, count: int, limit: int, words: Sequence[str] = (), cards: Sequence[str] = ()
    ) -> None:
        places = range(count)
        self.workers = [
            Worker(limit, words, cards[place % len(cards)] if cards else None) for place in places
        ]

    def __exit__(self, *_: object) -> None:
        """Kill all workers."""
        for worker in self.workers:
            worker.kill()

    @property
    def idle(self) -> list[Worker]:
        """The workers that can take a job."""
        return [worker for worker in self.workers if worker.is_idle]

    @property
    def jobs(self) -> list[Job]:
        """The jobs that workers are doing."""
        return [worker.job for worker in self.workers if worker.job is not None]

    def wait(self, seconds: float) -> list[tuple[Job, Outcome | Death]]:
        """Wait for lines of workers."""
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            ready = [key.data for key, _ in selector.select(seconds)]
        ended = [worker.read() for worker in ready]
        return [pair for pair in ended if pair is not None]
