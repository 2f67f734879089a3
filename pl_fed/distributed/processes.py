"""The processes of a run, and their communication.

It uses ``torch.distributed`` alone, with the process group that Lightning's strategy creates (gloo
on CPUs, NCCL on GPUs), and only operations of both backends: ``all_reduce``, ``all_gather`` and
``all_to_all``.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_LAUNCHER = "PL_FED_LAUNCHER"  # the id of the process that starts the other processes of its node
_POLL_SECONDS = 0.5
_BROKEN = re.compile(r"gloo|nccl|closed by peer|connection (was )?(reset|refused|closed)", re.I)


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
        dist.all_gather_into_tensor(gathered, padded)
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
    """Replace a backend's error about a broken connection by one sentence.

    Raises:
        LostProcessError: If another process has ended.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LostProcessError) or processes.size == 1 or not _is_broken(error):
            raise
        raise LostProcessError(
            f"Expected all {processes.size} processes to go on but process {processes.rank} lost"
            " touch with another, which has ended (its error message, if any, is above): resume the"
            " run from the last checkpoint, which is unchanged."
        ) from error


def announce_launcher() -> None:
    """Set this process's id in the environment, for the processes that it will start."""
    os.environ[_LAUNCHER] = str(os.getpid())


def end_with_launcher() -> None:
    """End this process with an error message if its launcher ends before all processes have met.

    Without this, PyTorch waits half an hour for the launcher. After the processes have met, a lost
    connection ends them.
    """
    launcher = os.environ.get(_LAUNCHER, "")
    if launcher.isdecimal() and os.name == "posix":
        is_child = os.getppid() == int(launcher)
        watch = threading.Thread(
            target=_wait_for_meeting, args=(int(launcher), is_child), daemon=True
        )
        watch.start()


def _wait_for_meeting(launcher: int, is_child: bool) -> None:
    while not dist.is_initialized():
        if (is_child and os.getppid() != launcher) or not _is_alive(launcher):
            print(
                "error: Expected the process that started this one to go on until all have met but"
                f" it has ended (process {launcher}; its error message, if any, is above): start"
                " the run again.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
        time.sleep(_POLL_SECONDS)


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
