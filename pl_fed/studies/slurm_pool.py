"""Jobs of Slurm that run cells, by submitit.

The study's folder, the current folder and the data must have the same paths on all machines, as on
a shared file system: locks, checkpoints and results are files.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pl_fed.studies.jobs import Job, encode
from pl_fed.studies.pool import ONE_THREAD, WorkerPool
from pl_fed.studies.readers import StudyError
from pl_fed.studies.remote_pool import RemotePool, RemoteSlot, do_encoded_job, import_engine

_POLL_SECONDS = 0.2


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
            self._executor = import_engine("submitit").AutoExecutor(
                folder=folder.absolute() / "%j", cluster=cluster
            )
            self._executor.update_parameters(**parameters)
        except (RuntimeError, NameError, TypeError, ValueError) as error:
            raise StudyError(
                f"Expected argument `options.on.slurm` to be parameters of a cluster but got"
                f" {error}: set `cluster: local` to run the jobs on this machine."
            ) from error
        self._slots = [RemoteSlot(self._start) for _ in range(workers)]

    def _start(self, slot: RemoteSlot, job: Job) -> None:
        path = [os.getcwd(), *sys.path]
        slot.worker = self._executor.submit(do_job_elsewhere, os.getcwd(), path, encode(job))

    def _collect(self, seconds: float) -> list[tuple[RemoteSlot, bytes | None]]:
        until = time.monotonic() + seconds
        while True:
            ended = [s for s in self._slots if s.job is not None and s.worker.done()]
            if ended or time.monotonic() > until:
                return [(slot, self._read(slot)) for slot in ended]
            time.sleep(_POLL_SECONDS)

    @staticmethod
    def _read(slot: RemoteSlot) -> bytes | None:
        error = slot.worker.exception()
        return None if error is not None else bytes(slot.worker.result())

    def __exit__(self, *_: object) -> None:
        """Cancel the jobs that have not ended."""
        for slot in self._slots:
            if slot.job is not None:
                slot.worker.cancel()


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
