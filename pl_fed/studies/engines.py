"""The pool of an engine that runs cells beyond this machine. Configs are checked on this one."""

from collections.abc import Callable
from pathlib import Path

from pl_fed.studies.pool import WorkerPool
from pl_fed.studies.ray_pool import RayPool
from pl_fed.studies.remote_pool import Remote, RemotePool
from pl_fed.studies.scratch_pool import ScratchPool
from pl_fed.studies.slurm_pool import SlurmPool

_SLURM_JOBS = 100  # runs that wait or run at the same time, by default


def open_remote_pool(
    remote: Remote,
    folder: Path,
    open_local: Callable[[], WorkerPool],
    workers: int | None,
    limit: int,
) -> RemotePool:
    """Return the pool of an engine.

    Args:
        remote: The engine.
        folder: The folder of the study.
        open_local: Starts workers on this machine, for the checks of configs.
        workers: The number of runs at the same time; by default as many as Ray has room for, or 100
            jobs of Slurm.
        limit: The number of runs of a Ray worker; then a fresh one takes its place.

    Raises:
        StudyError: If the engine is not installed, or cannot be reached.
    """
    if remote.options.get("scratch") is not None and remote.engine == "ray":
        return ScratchPool(remote.options, folder, open_local, workers, limit)
    if remote.engine == "ray":
        return RayPool(remote.options, open_local, workers, limit)
    return SlurmPool(remote.options, folder / "slurm", open_local, workers or _SLURM_JOBS)
