"""Processes of a Ray cluster that run cells."""

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pl_fed.studies.jobs import Job, encode
from pl_fed.studies.pool import ONE_THREAD, WorkerPool
from pl_fed.studies.readers import StudyError
from pl_fed.studies.remote_pool import RemotePool, RemoteSlot, do_encoded_job, import_engine


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

    The study's folder, the current folder and the data must have the same paths on all machines, as
    on a shared file system: locks, checkpoints and results are files.

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

    _kind: type = RayWorker

    def __init__(
        self,
        options: Mapping[str, Any],
        open_local: Callable[[], WorkerPool],
        workers: int | None,
        limit: int,
    ) -> None:
        super().__init__(open_local)
        self._ray = ray = import_engine("ray")
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
        self._actor = ray.remote(self._kind).options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=0,
            runtime_env={"env_vars": {**ONE_THREAD, "PYTHONPATH": path}},
        )
        self._pending: dict[Any, RemoteSlot] = {}
        self._slots = [RemoteSlot(self._start) for _ in range(workers or int(room))]

    def _start(self, slot: RemoteSlot, job: Job) -> None:
        """Give a job to the process of a slot; a fresh one, if it has done its number of runs."""
        if slot.worker is None or slot.runs >= self._limit:
            self._end(slot)
            words = getattr(job, "arguments", [])
            slot.worker = self._actor.remote(os.getcwd(), words)
        slot.runs += 1
        self._pending[self._submit(slot.worker, job)] = slot

    def _submit(self, worker: Any, job: Job) -> Any:
        """Send a job to a process, and return the reference of its result."""
        return worker.do.remote(encode(job))

    def _end(self, slot: RemoteSlot) -> None:
        """End the process of a slot."""
        if slot.worker is not None:
            self._ray.kill(slot.worker)
        slot.worker, slot.runs = None, 0

    def _collect(self, seconds: float) -> list[tuple[RemoteSlot, Any]]:
        if not self._pending:  # other processes run the cells that are left
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait(list(self._pending), timeout=seconds)
        ended: list[tuple[RemoteSlot, Any]] = []
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
