"""Pools beyond one machine: runs on a Ray cluster, or as jobs of Slurm.

The study's folder, the current folder and the data must have the same paths on all machines, as on
a shared file system: locks, checkpoints and results are files. Configs are checked on this machine.
"""

import os
import socket
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pl_fed.studies.jobs import Job, Outcome, decode, encode
from pl_fed.studies.pool import ONE_THREAD, Pool, WorkerPool
from pl_fed.studies.readers import StudyError, read_mapping, refuse

ENGINES = ("ray", "slurm")
_POLL_SECONDS = 0.2
_SLURM_JOBS = 100  # runs that wait or run at the same time, by default


@dataclass(frozen=True)
class Remote:
    """Remote: an engine that runs cells on other machines, with its options.

    Attributes:
        engine: ``ray`` or ``slurm``.
        options: For Ray ``address``, ``cpus`` and ``gpus`` of a run (0.25 puts four runs on one
            card), for Slurm ``cluster`` (``local`` runs the jobs here) and the parameters of
            submitit, such as ``slurm_partition``, ``timeout_min`` and ``gpus_per_node``.
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
    allowed = ("address", "cpus", "gpus") if engine == "ray" else ()
    return Remote(engine, read_mapping(f"{path}.{engine}", options, allowed))


def open_remote_pool(
    remote: Remote,
    folder: Path,
    open_local: Callable[[], WorkerPool],
    workers: int | None,
    limit: int,
) -> "RemotePool":
    """Return the pool of an engine.

    Args:
        remote: The engine.
        folder: The folder of the study, for the files of Slurm's jobs.
        open_local: Starts workers on this machine, for the checks of configs.
        workers: The number of runs at the same time; by default as many as Ray has room for, or 100
            jobs of Slurm.
        limit: The number of runs of a Ray worker; then a fresh one takes its place.

    Raises:
        StudyError: If the engine is not installed, or cannot be reached.
    """
    if remote.engine == "ray":
        return RayPool(remote.options, open_local, workers, limit)
    return SlurmPool(remote.options, folder / "slurm", open_local, workers or _SLURM_JOBS)


@dataclass
class _Slot:
    """Slot: a place for one run on another machine."""

    start: Callable[["_Slot", Job], None]
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
        self._slots: list[_Slot] = []

    @property
    def idle(self) -> Sequence[_Slot]:
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
    def _collect(self, seconds: float) -> list[tuple[_Slot, bytes | None]]:
        """Return the slots whose job has ended, each with its outcome; ``None`` after a death."""

    def wait(self, seconds: float) -> list[tuple[Job, Outcome | None]]:
        """Wait for the end of jobs."""
        ended: list[tuple[Job, Outcome | None]] = []
        for slot, line in self._collect(seconds):
            job, slot.job = slot.job, None
            if job is not None:
                ended.append((job, None if line is None else decode(line)))
        return ended


class RayWorker:
    """Ray worker: does jobs in a process of a Ray cluster, on one thread.

    Args:
        folder: The current folder of the study.
        words: The command line of a cell: its loggers are imported, too.
    """

    def __init__(self, folder: str, words: Sequence[str]) -> None:
        os.chdir(folder)
        from pl_fed.studies.worker import import_all

        import_all(list(words))
        import torch

        torch.set_num_threads(1)

    def do(self, line: bytes) -> bytes:
        """Do a job."""
        return do_encoded_job(line)


class RayPool(RemotePool):
    """Ray pool: each run has a process of a Ray cluster.

    Args:
        options: ``address`` of the cluster (by default a running one, else one on this machine),
            ``cpus`` and ``gpus`` of a run.
        open_local: Starts workers on this machine.
        workers: The number of runs at the same time; by default as many as the cluster has room
            for.
        limit: The number of runs of a process; then a fresh one takes its place.

    Raises:
        StudyError: If Ray is not installed, or the cluster cannot be reached or is too small.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        open_local: Callable[[], WorkerPool],
        workers: int | None,
        limit: int,
    ) -> None:
        super().__init__(open_local)
        self._ray = ray = _import_engine("ray")
        self._limit = limit
        self._began = not ray.is_initialized()
        if self._began:
            _connect(ray, options.get("address"))
        cpus, gpus = float(options.get("cpus", 1)), float(options.get("gpus", 0))
        total = ray.cluster_resources()
        room = min(
            total.get(name, 0) / share
            for name, share in (("CPU", cpus), ("GPU", gpus))
            if share > 0
        )
        if room < 1:
            raise StudyError(
                f"Expected argument `options.on.ray` to have room for a run of {cpus:g} CPUs and"
                f" {gpus:g} GPUs but got a cluster with {total.get('CPU', 0):g} and"
                f" {total.get('GPU', 0):g}: set `cpus` and `gpus`, or add nodes."
            )
        path = os.pathsep.join(dict.fromkeys(filter(None, [os.getcwd(), *sys.path])))
        self._actor = ray.remote(RayWorker).options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=0,
            runtime_env={"env_vars": {**ONE_THREAD, "PYTHONPATH": path}},
        )
        self._pending: dict[Any, _Slot] = {}
        self._slots = [_Slot(self._start) for _ in range(workers or int(room))]

    def _start(self, slot: _Slot, job: Job) -> None:
        if slot.worker is None or slot.runs >= self._limit:
            self._end(slot)
            words = getattr(job, "arguments", [])
            slot.worker = self._actor.remote(os.getcwd(), words)
        slot.runs += 1
        self._pending[slot.worker.do.remote(encode(job))] = slot

    def _end(self, slot: _Slot) -> None:
        """End the process of a slot."""
        if slot.worker is not None:
            self._ray.kill(slot.worker)
        slot.worker, slot.runs = None, 0

    def _collect(self, seconds: float) -> list[tuple[_Slot, bytes | None]]:
        if not self._pending:
            return []
        ready, _ = self._ray.wait(list(self._pending), timeout=seconds)
        ended: list[tuple[_Slot, bytes | None]] = []
        for reference in ready:
            slot = self._pending.pop(reference)
            try:
                ended.append((slot, self._ray.get(reference)))
            except self._ray.exceptions.RayActorError:
                self._end(slot)
                ended.append((slot, None))
        return ended

    def __exit__(self, *_: object) -> None:
        """End all processes, and a cluster that this pool has started."""
        for slot in self._slots:
            self._end(slot)
        if self._began:
            self._ray.shutdown()


class SlurmPool(RemotePool):
    """Slurm pool: each run is a job of Slurm, by submitit.

    Args:
        options: ``cluster`` and the parameters of ``submitit.AutoExecutor``.
        folder: The folder of the jobs' files.
        open_local: Starts workers on this machine.
        workers: The number of jobs that wait or run at the same time.

    Raises:
        StudyError: If submitit is not installed, or refuses a parameter.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        folder: Path,
        open_local: Callable[[], WorkerPool],
        workers: int,
    ) -> None:
        super().__init__(open_local)
        parameters = {"cpus_per_task": 1, "timeout_min": 24 * 60, "name": "pl_fed", **options}
        cluster = parameters.pop("cluster", "slurm")
        try:
            self._executor = _import_engine("submitit").AutoExecutor(
                folder=folder.absolute() / "%j", cluster=cluster
            )
            self._executor.update_parameters(**parameters)
        except (RuntimeError, NameError, TypeError, ValueError) as error:
            raise StudyError(
                f"Expected argument `options.on.slurm` to be parameters of a cluster but got"
                f" {error}: set `cluster: local` to run the jobs on this machine."
            ) from error
        self._slots = [_Slot(self._start) for _ in range(workers)]

    def _start(self, slot: _Slot, job: Job) -> None:
        path = [os.getcwd(), *sys.path]
        slot.worker = self._executor.submit(do_job_elsewhere, os.getcwd(), path, encode(job))

    def _collect(self, seconds: float) -> list[tuple[_Slot, bytes | None]]:
        until = time.monotonic() + seconds
        while True:
            ended = [s for s in self._slots if s.job is not None and s.worker.done()]
            if ended or time.monotonic() > until:
                return [(slot, self._read(slot)) for slot in ended]
            time.sleep(_POLL_SECONDS)

    @staticmethod
    def _read(slot: _Slot) -> bytes | None:
        error = slot.worker.exception()
        return None if error is not None else bytes(slot.worker.result())

    def __exit__(self, *_: object) -> None:
        """Cancel the jobs that have not ended."""
        for slot in self._slots:
            if slot.job is not None:
                slot.worker.cancel()


def do_encoded_job(line: bytes) -> bytes:
    """Do a job in this process, as bytes."""
    from pl_fed.studies.worker import do_job

    return encode(do_job(decode(line)))


def do_job_elsewhere(folder: str, path: Sequence[str], line: bytes) -> bytes:
    """Do a job in a fresh process of another machine.

    Args:
        folder: The current folder of the study.
        path: The search path of modules of the study.
        line: The job.
    """
    os.environ.update(ONE_THREAD)
    os.chdir(folder)
    sys.path[:] = list(dict.fromkeys([*path, *sys.path]))
    import torch

    torch.set_num_threads(1)
    return do_encoded_job(line)


def _import_engine(name: str) -> Any:
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


def _connect(ray: Any, address: str | None) -> None:
    """Connect to a Ray cluster, or start one on this machine.

    Raises:
        StudyError: If there is no cluster at the address.
    """
    options = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
    try:
        if address is None:
            ray.init(**options)
        else:
            options.pop("include_dashboard")
            _try_connection(address)
            ray.init(address=address, **options)
    except (OSError, ValueError) as error:
        raise StudyError(
            f"Expected argument `options.on.ray.address` to be that of a running cluster but got"
            f" {address}: {str(error).splitlines()[0]}."
        ) from error


def _try_connection(address: str) -> None:
    """Connect to the port of an address, if it has one: Ray itself would end this process.

    Raises:
        OSError: If nothing answers there within five seconds.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal() and host:
        socket.create_connection((host, int(port)), timeout=5).close()
