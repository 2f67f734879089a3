"""The processes that share a federation, and what they tell each other.

Only ``torch.distributed`` over the group that Lightning's strategy has made (gloo on CPUs, NCCL on
GPUs), and of it only what both backends have: ``all_reduce``, ``all_gather``, ``all_to_all``.
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

_LAUNCHER = "PL_FED_LAUNCHER"  # the id of the process that starts the others of its node
_LOOK_SECONDS = 0.5
_BROKEN = re.compile(r"gloo|nccl|closed by peer|connection (was )?(reset|refused|closed)", re.I)


class LostProcessError(RuntimeError):
    """Another process of the run is gone."""


@dataclass(frozen=True)
class Processes:
    """This process among those of a run. By default it is alone, and everything costs nothing.

    Every process must call the methods that talk, in the same order.

    Args:
        rank: Which process this is, from 0.
        size: Number of processes.
        here: How many of them are on this node, and share its memory.

    Example:
        >>> Processes().sum(torch.tensor([1.0])), Processes().everyones("mine")
        (tensor([1.]), ['mine'])
        >>> Processes(rank=1, size=2).at_home(torch.arange(4))
        tensor([False,  True, False,  True])
    """

    rank: int = 0
    size: int = 1
    here: int = 1

    def homes(self, clients: Tensor) -> Tensor:
        """Return the process at which each client is at home: that of ``id % size``."""
        return clients % self.size

    def at_home(self, clients: Tensor) -> Tensor:
        """Return which clients are at home in this process, bool."""
        return self.homes(clients) == self.rank

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the processes, the same bits in each."""
        if self.size == 1:
            return tensor
        total = tensor.to(_wire(), copy=True).contiguous()
        dist.all_reduce(total)
        return total.to(tensor.device)

    def everyones(self, value: Any) -> list[Any]:
        """Return what each process gives: something small that can be pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def first(self, value: Any) -> Any:
        """Return what the first process gives that has something other than ``None`` to give."""
        return next((each for each in self.everyones(value) if each is not None), None)

    def gather(self, rows: Tensor, length: int) -> Tensor:
        """Return everybody's rows, one process after the other.

        Args:
            rows: Shape [at most length, ...].
            length: To how many rows each is filled up, with whatever.

        Returns:
            Shape [size · length, ...].
        """
        if self.size == 1:
            return rows
        sent = rows.to(_wire()).contiguous()
        if len(rows) < length:
            sent = sent.new_zeros(length, *rows.shape[1:])
            sent[: len(rows)] = rows
        gathered = sent.new_empty(self.size * length, *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, sent)
        return gathered.to(rows.device)

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send each process some rows, and return what comes from each, one after the other.

        Args:
            rows: First those for process 0, then those for process 1, ..., [Σ sent, ...].
            sent: How many go to each.
            received: How many come from each.

        Returns:
            Shape [Σ received, ...].
        """
        if self.size == 1:
            return rows
        sending = rows.to(_wire()).contiguous()
        coming = sending.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(coming, sending, list(received), list(sent))
        return coming.to(rows.device)

    @contextmanager
    def together(self, kind: type[Exception]) -> Iterator[None]:
        """Raise an error of one kind in every process when one raises it."""
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
        messages = self.everyones(None if error is None else str(error))
        raise kind(next(message for message in messages if message is not None)) from error


@contextmanager
def watched(processes: Processes) -> Iterator[None]:
    """Say in one sentence that another process is gone, where the backend says it in its own way.

    Raises:
        LostProcessError: If it is.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LostProcessError) or processes.size == 1 or not _is_broken(error):
            raise
        raise LostProcessError(
            f"Expected all {processes.size} processes to go on but process {processes.rank} lost"
            " touch with another, which has ended (what it said, if anything, stands above): the"
            " last checkpoint is left as it is, to be resumed from."
        ) from error


def name_launcher() -> None:
    """Tell the processes that this one will start which one it is."""
    os.environ[_LAUNCHER] = str(os.getpid())


def end_with_launcher() -> None:
    """End this process with a sentence if its launcher ends before the processes have met.

    PyTorch would wait for it for half an hour. Once they have met, a lost connection ends both.
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
                f" it has ended (process {launcher}; what it said, if anything, stands above):"
                " start the run again.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
        time.sleep(_LOOK_SECONDS)


def _is_alive(process: int) -> bool:
    """Whether a process is there, and not dead with nobody having asked yet how it ended."""
    try:
        os.kill(process, 0)
        status = Path(f"/proc/{process}/stat").read_text()
    except ProcessLookupError:
        return False
    except OSError:  # of another user, or a system without /proc
        return True
    return status.rpartition(")")[2].split()[0] != "Z"


def _is_broken(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or bool(_BROKEN.search(str(error)))


def _wire() -> torch.device:
    """Return the device whose tensors the group's backend carries."""
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
