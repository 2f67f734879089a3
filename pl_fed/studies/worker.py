"""A process that runs cells: it imports PyTorch and Lightning once, and forks.

The parent of the forks only imports. It forks one child at a time to do jobs; if the child is
killed, or has done its number of runs, the parent forks another one. Jobs come as lines on standard
input, and outcomes go as lines to standard output.
"""

import gc
import os
import select
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pl_fed.studies.jobs import Job, Outcome

RECYCLE = 75
"""Exit status of a child that has done its number of runs."""

READY = b"ready\n"
"""Line of a worker after its imports."""

_SECONDS = 1.0  # between two looks at the parent


def import_all(words: list[str]) -> None:
    """Import the modules of runs; the garbage collector leaves out their objects.

    Args:
        words: The command line of a cell: W&B is imported first if it is likely to be used.
    """
    from pl_fed.command.wandb_runs import import_wandb_first
    from pl_fed.lazy_imports import import_lazily

    gc.disable()
    if "--trainer.logger=false" not in words:
        import_wandb_first(words)
    import_lazily()
    import pl_fed.studies.cell_run  # noqa: F401
    from pl_fed.command.main import prepare_output

    prepare_output()
    gc.collect()
    gc.freeze()
    gc.enable()


def supervise(channel: int, limit: int) -> None:
    """Fork children that do jobs, one after another, until there are no more jobs."""
    from pl_fed.studies.jobs import Death, encode

    while True:
        child = os.fork()
        if not child:
            sys.exit(work(channel, limit))
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return
        if code != RECYCLE:
            os.write(channel, encode(Death.from_exit_code(code)))


def work(channel: int, limit: int | None) -> int:
    """Do jobs until there are no more, or the number of runs is reached; return the exit status.

    Args:
        channel: File descriptor for the outcomes.
        limit: The largest number of runs; ``None`` is unlimited.
    """
    from pl_fed.studies.jobs import RunJob, decode, encode

    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    runs = 0
    while limit is None or runs < limit:
        line = _read_line()
        if not line:
            return 0
        job = decode(line)
        os.write(channel, encode(do_job(job)))
        runs += isinstance(job, RunJob)
    return RECYCLE


def do_job(job: "Job") -> "Outcome":
    """Do a job in this process, and return its outcome."""
    from pl_fed.studies.cell_configs import InvalidCellError
    from pl_fed.studies.cell_run import check_cell, run_cell
    from pl_fed.studies.jobs import CheckJob, CheckOutcome

    if not isinstance(job, CheckJob):
        return run_cell(job)
    try:
        return CheckOutcome(changes=check_cell(job.arguments, Path(job.root), job.folders))
    except InvalidCellError as error:
        return CheckOutcome(error=str(error))


def _read_line() -> bytes:
    """Return a line of standard input, and not a byte more; empty at the end."""
    line = b""
    while not line.endswith(b"\n"):
        letter = os.read(0, 1 << 16)  # the parent sends a job only after the last outcome
        if not letter:
            return b""
        line += letter
    return line


def _end_with_parent(parent: int) -> None:
    """End this process when the study ends, or the process that forked this one."""
    poll = select.poll()
    poll.register(0, 0)  # only hang-ups
    while os.getppid() == parent:
        if poll.poll(_SECONDS * 1_000):
            break
    os._exit(1)


def main() -> None:
    """Run the worker: ``python -m pl_fed.studies.worker LIMIT WORDS…``."""
    limit, words = int(sys.argv[1]), sys.argv[2:]
    channel = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    sys.argv[1:] = []
    import_all(words)

    import torch

    torch.set_num_threads(1)
    os.write(channel, READY)
    if sys.platform == "linux":
        supervise(channel, limit)
    else:
        work(channel, None)


if __name__ == "__main__":
    main()
