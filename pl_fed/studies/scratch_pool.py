"""A Ray cluster without a shared file system: the files of its runs come home."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from pl_fed.studies.cell_folder import CellFolder, CellRecord, State
from pl_fed.studies.jobs import Job, RunJob, RunOutcome, decode, encode
from pl_fed.studies.pool import WorkerPool
from pl_fed.studies.ray_pool import RayPool, RayWorker
from pl_fed.studies.remote_pool import RemoteSlot
from pl_fed.studies.scratch_runs import pack, read_layers, run_in_scratch, unpack


class ScratchWorker(RayWorker):
    """Scratch worker: does jobs in a process of a Ray cluster, with files in a local folder.

    Args:
        folder: The current folder of the study; this machine may not have it.
        words: The command line of a cell: its loggers are imported, too.
    """

    def __init__(self, folder: str, words: Sequence[str]) -> None:
        super().__init__(".", words)

    def do_in_scratch(
        self,
        line: bytes,
        parcel: bytes,
        layers: Mapping[str, str],
        scratch: str,
        mailbox: Any,
        check_seconds: float,
    ) -> tuple[bytes, bytes, bytes]:
        """Run a cell in a local folder.

        Args:
            line: The job.
            parcel: The files of the cell at home.
            layers: The texts of the layers that are files at home, by their paths.
            scratch: The local folder of all studies.
            mailbox: The :class:`Mailbox` for parcels of the run.
            check_seconds: The time between two looks for a new checkpoint.

        Returns:
            The outcome, the parcel of the cell, and that of runs moved aside.
        """
        import ray

        job = decode(line)

        def send(content: bytes) -> None:
            """Send home a parcel of the run."""
            ray.get(mailbox.put.remote(job.path, content))

        outcome, files, aside = run_in_scratch(
            job, parcel, layers, Path(scratch), send, check_seconds
        )
        return encode(outcome), files, aside


class Mailbox:
    """Mailbox: holds the last parcel of each run until the study takes it."""

    def __init__(self) -> None:
        self._parcels: dict[str, bytes] = {}

    def put(self, path: str, parcel: bytes) -> None:
        """Add the parcel of a cell; it replaces an earlier one."""
        self._parcels[path] = parcel

    def take(self) -> dict[str, bytes]:
        """Return all parcels by the paths of their cells, and forget them."""
        parcels, self._parcels = self._parcels, {}
        return parcels


def _check_run(job: Job | None) -> RunJob:
    """Return a job that is a run; configs are checked on the machine of the study."""
    if not isinstance(job, RunJob):
        raise TypeError(f"a process elsewhere does only runs, not {job}")
    return job


class ScratchPool(RayPool):
    """Scratch pool: a run has its files in a folder of its machine, and they come home.

    This process locks the cells that run, and writes their files to the folder of the study. Data
    and modules of the study must be on all machines.

    Args:
        options: ``scratch``, the folder on each machine, and the options of :class:`RayPool`.
        folder: The folder of the study.
        open_local: Starts workers on this machine.
        workers: The number of runs at the same time; by default as many as the cluster has room
            for.
        limit: The number of runs of a process; then a fresh one takes its place.

    Raises:
        StudyError: If Ray is not installed, or the cluster cannot be reached or is too small.
    """

    _kind = ScratchWorker
    check_seconds = 10.0  # between two looks for a new checkpoint

    def __init__(
        self,
        options: Mapping[str, Any],
        folder: Path,
        open_local: Callable[[], WorkerPool],
        workers: int | None,
        limit: int,
    ) -> None:
        super().__init__(options, open_local, workers, limit)
        self._folder, self._scratch = folder, options["scratch"]
        self._locks: dict[str, ExitStack] = {}
        self._refused: list[RemoteSlot] = []  # with cells that other processes run
        self._mailbox = self._open_mailbox()

    def _open_mailbox(self) -> Any:
        """Start the mailbox on the machine of this process."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = self._ray.get_runtime_context().get_node_id()
        strategy = NodeAffinitySchedulingStrategy(node, soft=True)
        mailbox = self._ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=strategy)
        return mailbox.remote()

    def _start(self, slot: RemoteSlot, job: Job) -> None:
        """Give a cell to the process of a slot, unless another process has locked it."""
        run, lock = _check_run(job), ExitStack()
        cell = CellFolder(self._folder, run.path)
        if not lock.enter_context(cell.lock()):
            lock.close()
            self._refused.append(slot)
            return
        self._locks[run.path] = lock
        if not cell.path.exists():  # a process that dies before a checkpoint leaves a failed cell
            cell.write_record(CellRecord(**run.record))
        super()._start(slot, run)

    def _submit(self, worker: Any, job: Job) -> Any:
        """Send a cell and its files to a process."""
        run = replace(_check_run(job), root=str(self._folder.absolute()))
        files = pack(self._folder / run.path)
        return worker.do_in_scratch.remote(
            encode(run),
            files,
            read_layers(run.arguments),
            self._scratch,
            self._mailbox,
            self.check_seconds,
        )

    def _collect(self, seconds: float) -> list[tuple[RemoteSlot, bytes | None]]:
        refused, self._refused = self._refused, []
        running = encode(RunOutcome(State.RUNNING))
        ended: list[tuple[RemoteSlot, bytes | None]] = [(slot, running) for slot in refused]
        try:
            results = super()._collect(0 if refused else seconds)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        self._write_parcels()
        for slot, result in results:
            run = _check_run(slot.job)
            cell = CellFolder(self._folder, run.path)
            outcome, files, aside = result or (None, b"", b"")
            unpack(files, cell.path)
            unpack(aside, cell.aside, removes=False)
            self._locks.pop(run.path).close()
            ended.append((slot, outcome))
        return ended

    def _write_parcels(self) -> None:
        """Write the files that runs have sent with their checkpoints."""
        for path, parcel in self._ray.get(self._mailbox.take.remote()).items():
            unpack(parcel, CellFolder(self._folder, path).path)

    def __exit__(self, *error: object) -> None:
        """Bring the last checkpoints home, and end all processes."""
        try:
            self._write_parcels()
        finally:
            for lock in self._locks.values():
                lock.close()
            super().__exit__(*error)
