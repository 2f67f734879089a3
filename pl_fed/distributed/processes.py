"""The processes of a run, and their communication.

It uses ``torch.distributed`` alone, with the process group that Lightning's strategy creates (gloo
on CPUs, NCCL on GPUs), and only operations of both backends: ``all_reduce``, ``all_gather`` and
``all_to_all``.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_LAUNCHER = "PL_FED_LAUNCHER"  # the id of the process that starts the other processes of its node
_POLL_SECONDS = 0.5
_MEETING_SECONDS = 300.0  # for processes to meet, besides the time that they need to start
_ORPHAN_SECONDS = 60.0  # for a process to end after its launcher
_ENDING_SECONDS = 10.0  # for other processes to end after an error in their launcher
_STARTED = time.monotonic()
_have_met = threading.Event()
_OPTION = "trainer.strategy.timeout"
_TIMED_OUT = re.compile(r"time(d)?[ -]?out", re.I)
_MILLISECONDS = re.compile(r"(\d+) ?ms\b")
_BROKEN = re.compile(
    r"gloo|nccl|closed by peer|pair closure|connection (was )?(reset|refused|closed)", re.I
)


class LostProcessError(RuntimeError):
    """Lost process: another process of the run has ended."""


@dataclass(frozen=True)
class Processes:
    """Processes: the process group of a run, as seen from this process.

    The default is a single process, for which all methods return at once. Every process must call
    the methods that communicate, in the same order.

    The home process of a client stores the client's states: its rank is ``id % size``.

    Args:
        rank: The rank of this process, from 0.
        size: Number of processes.
        local_size: Number of processes on this node, which share its memory.

    Example:
        >>> Processes().sum(torch.tensor([1.0])), Processes().gather_objects("value")
        (tensor([1.]), ['value'])
        >>> Processes(rank=1, size=2).is_home(torch.arange(4))
        tensor([False,  True, False,  True])
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1

    def home_ranks(self, clients: Tensor) -> Tensor:
        """Return the rank of each client's home process, int64 [clients]."""
        return clients % self.size

    def is_home(self, clients: Tensor) -> Tensor:
        """Return whether this process is the home of each client, bool [clients]."""
        return self.home_ranks(clients) == self.rank

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the processes, bit-equal in every process."""
        if self.size == 1:
            return tensor
        total = tensor.to(_communication_device(), copy=True).contiguous()
        dist.all_reduce(total)
        return total.to(tensor.device)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank; they should be small, and are pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def select_first(self, value: Any) -> Any:
        """Return the value of the first process, by rank, with a value other than ``None``."""
        values = self.gather_objects(value)
        return next((value for value in values if value is not None), None)

    def gather(self, rows: Tensor, length: int) -> Tensor:
        """Return the rows of all processes, by rank.

        Args:
            rows: The rows of this process, [at most length, ...].
            length: Number of rows of each process in the result. Padding rows are arbitrary.

        Returns:
            Shape [size · length, ...].
        """
        if self.size == 1:
            return rows
        padded = rows.to(_communication_device()).contiguous()
        if len(rows) < length:
            padded = padded.new_zeros(length, *rows.shape[1:])
            padded[: len(rows)] = rows
        gathered = padded.new_empty(self.size * length, *rows.shape[1:])
        # torch has renamed it, and warns about the earlier name
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered, padded)
        return gathered.to(rows.device)

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows to each process, and return the rows from all processes, by rank.

        Args:
            rows: The rows for process 0, then the rows for process 1, ..., [Σ sent, ...].
            sent: Number of rows for each process.
            received: Number of rows from each process.

        Returns:
            Shape [Σ received, ...].
        """
        if self.size == 1:
            return rows
        outgoing = rows.to(_communication_device()).contiguous()
        incoming = outgoing.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(incoming, outgoing, list(received), list(sent))
        return incoming.to(rows.device)

    @contextmanager
    def raise_in_all(self, kind: type[Exception]) -> Iterator[None]:
        """Raise an error of one kind in every process if any process raises it."""
        if self.size == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except kind as raised:
            error = raised
        if float(self.sum(torch.tensor(float(error is not None)))) == 0:
            return
        messages = self.gather_objects(None if error is None else str(error))
        raise kind(next(message for message in messages if message is not None)) from error


@contextmanager
def explain_lost_process(processes: Processes) -> Iterator[None]:
    """Replace a backend's error about a broken connection, or a time-out, by one sentence.

    Raises:
        LostProcessError: If another process has ended, or does not answer in time.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LostProcessError) or processes.size == 1 or not _is_broken(error):
            raise
        raise LostProcessError(_describe_loss(processes, str(error))) from error


def _describe_loss(processes: Processes, message: str) -> str:
    """Return the sentence for a backend's error: another process has ended, or does not answer."""
    size, rank = processes.size, processes.rank
    if not _TIMED_OUT.search(message):
        return (
            f"Expected all {size} processes to go on but process {rank} lost touch with another,"
            " which has ended (its error message, if any, is above): resume the run from the last"
            " checkpoint, which is unchanged."
        )
    if not (dist.is_available() and dist.is_initialized()):
        return _describe_missed_meeting(size, rank, f"the time of `{_OPTION}`")
    milliseconds = _MILLISECONDS.search(message)
    limit = f" {int(milliseconds[1]) / 1000:g} s" if milliseconds else ""
    return (
        f"Expected all {size} processes to answer within the time of `{_OPTION}`{limit} but process"
        f" {rank} waited longer for another, which hangs or is slow: set `trainer.strategy` to"
        f" DDPStrategy and `{_OPTION}` to a longer time, such as 02:00:00, or look for what hangs,"
        " and resume the run from the last checkpoint, which is unchanged."
    )


def _describe_missed_meeting(size: int, rank: int, limit: str) -> str:
    return (
        f"Expected all {size} processes to meet within {limit} but process {rank} still waits for"
        " another, which died in its start (its error message, if any, is above) or needs longer to"
        " start: start the run again."
    )


def announce_launcher() -> None:
    """Set this process's id in the environment, for the processes that it will start."""
    os.environ[_LAUNCHER] = str(os.getpid())


def end_with_launcher() -> None:
    """End this process with an error message if its launcher ends before this process does.

    Without this, PyTorch waits half an hour for the launcher before all processes have met, and a
    process that hangs would stay after its launcher. After the meeting, a lost connection ends
    processes that do not hang, so this process has a minute.
    """
    launcher = os.environ.get(_LAUNCHER, "")
    if launcher.isdecimal() and os.name == "posix":
        is_child = os.getppid() == int(launcher)
        _start_watch(_wait_for_launcher, int(launcher), is_child)


def note_meeting() -> None:
    """Note that all processes have met.

    The process group does not tell this later: a lost connection may have closed it.
    """
    _have_met.set()


def _wait_for_launcher(launcher: int, is_child: bool) -> None:
    while not ((is_child and os.getppid() != launcher) or not _is_alive(launcher)):
        time.sleep(_POLL_SECONDS)
    moment = "all have met"
    if _have_met.is_set():
        moment = "this one has ended"
        time.sleep(_ORPHAN_SECONDS)
    _exit_with_error(
        f"Expected the process that started this one to go on until {moment} but it has ended"
        f" (process {launcher}; its error message, if any, is above): start the run again."
    )


def limit_meeting(processes: Processes) -> None:
    """End this process with an error message if the processes do not meet in time.

    They have five minutes, and twice the time that this process took to start: others may start
    when this one already waits, and read the data first. ``trainer.strategy.timeout`` counts later.
    """
    if processes.size > 1 and not dist.is_initialized():
        _start_watch(_wait_for_meeting, processes, _MEETING_SECONDS)


def _wait_for_meeting(processes: Processes, seconds: float) -> None:
    now = time.monotonic()
    until = now + seconds + 2 * (now - _STARTED)
    while not dist.is_initialized():
        if time.monotonic() > until:
            limit = f"{until - now:.0f} s"
            _exit_with_error(_describe_missed_meeting(processes.size, processes.rank, limit))
        time.sleep(_POLL_SECONDS)


@contextmanager
def end_launched_processes(launcher: Any) -> Iterator[None]:
    """End the processes that this one has launched if it fails; one that hangs would stay.

    They have ten seconds to end by themselves. This process goes on meanwhile, to report its error.

    Args:
        launcher: The launcher, with its processes as ``procs`` if it is that of this node. It
            forgets them after an error, because it would kill this process when one of them ends.
    """
    try:
        yield
    except BaseException:
        launched: list[subprocess.Popen[Any]] = getattr(launcher, "procs", [])
        remaining = [*launched]
        launched.clear()
        if remaining:
            threading.Thread(target=_end_processes, args=(remaining,)).start()
        raise


def _end_processes(launched: list[subprocess.Popen[Any]]) -> None:
    until = time.monotonic() + _ENDING_SECONDS
    while any(process.poll() is None for process in launched) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    for process in launched:
        process.send_signal(getattr(signal, "SIGKILL", signal.SIGTERM))  # unless it has ended


def _start_watch(watch: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=watch, args=args, daemon=True).start()


def _exit_with_error(message: str) -> None:
    """End this process at once: its main thread may wait within PyTorch."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(1)


def _is_alive(process: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        os.kill(process, 0)
        status = Path(f"/proc/{process}/stat").read_text()
    except ProcessLookupError:
        return False
    except OSError:  # another user's process, or a system without /proc
        return True
    return status.rpartition(")")[2].split()[0] != "Z"


def _is_broken(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or bool(_BROKEN.search(str(error)))


def _communication_device() -> torch.device:
    """Return the device of the tensors that the process group's backend sends."""
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
