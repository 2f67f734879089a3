"""Rows in a file that has no name: read and written row by row, so that none stays in memory."""

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar
from weakref import WeakSet

import torch
from torch import Tensor

_READ_AHEAD = 1 << 20  # bytes of one request: the system cuts off what is longer


class DiskRows:
    """Rows in a file, which nothing is left of when the process ends, however it ends.

    Rows go through the system's cache of files, which other programs' needs come before.

    Args:
        row: A row like all others, shape [numel].
        folder: Where to put the file.

    Example:
        >>> rows = DiskRows(torch.zeros(2), Path(tempfile.gettempdir()))
        >>> rows.write([3], torch.tensor([[1.0, 2.0]]))
        >>> rows.read([3]).tolist()
        [[1.0, 2.0]]
    """

    _mapped: ClassVar["WeakSet[mmap.mmap]"] = WeakSet()

    def __init__(self, row: Tensor, folder: Path) -> None:
        self.numel, self.dtype, self.folder = row.numel(), row.dtype, folder
        self.row_bytes = row.nbytes
        self._file = tempfile.TemporaryFile(  # noqa: SIM115 (it is open as long as this lives)
            prefix="pl_fed_", dir=folder, buffering=0
        )

    def read(self, positions: list[int]) -> Tensor:
        """Return rows, shape [positions, numel], on the CPU."""
        rows = torch.empty(len(positions), self.numel, dtype=self.dtype)
        for position, row in zip(positions, _bytes_of(rows)):
            done = 0
            while done < len(row):
                got = os.preadv(self._file.fileno(), [row[done:]], position * self.row_bytes + done)
                if not got:
                    raise OSError(f"Expected row {position} of the clients' states but got none.")
                done += got
        return rows

    def write(self, positions: list[int], rows: Tensor) -> None:
        """Write rows, shape [positions, numel].

        Raises:
            OSError: If the disk is full.
        """
        try:
            for position, row in zip(positions, _bytes_of(rows.contiguous())):
                done = 0
                while done < len(row):
                    begin = position * self.row_bytes + done
                    done += os.pwrite(self._file.fileno(), row[done:], begin)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise OSError(
                f"Expected the disk of the clients' states ({self.folder}) to have room for"
                f" {len(positions)} rows of {self.row_bytes / 2**20:.1f} MiB but it is full: set"
                " `store` to a folder on a larger one."
            ) from error

    def prefetch(self, positions: list[int]) -> None:
        """Let the system read rows ahead while something else is done."""
        if not hasattr(os, "posix_fadvise"):
            return
        for position in positions:
            first = position * self.row_bytes
            for begin in range(first, first + self.row_bytes, _READ_AHEAD):
                size = min(_READ_AHEAD, first + self.row_bytes - begin)
                os.posix_fadvise(self._file.fileno(), begin, size, os.POSIX_FADV_WILLNEED)

    def pieces(self, count: int, rows: int) -> Iterator[Tensor]:
        """Yield the first ``count`` rows, so many at a time, mapped from the file.

        They are not to be changed, and change with the file.
        """
        for first in range(0, count, rows):
            numbers = min(rows, count - first) * self.numel
            start = first * self.row_bytes
            begin = start - start % mmap.ALLOCATIONGRANULARITY
            size = start - begin + numbers * self.dtype.itemsize
            mapped = mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_COPY, offset=begin)
            self._mapped.add(mapped)
            piece = torch.frombuffer(mapped, dtype=self.dtype, count=numbers, offset=start - begin)
            yield piece.view(-1, self.numel)

    @classmethod
    def give_back(cls) -> None:
        """Let go of the memory of what is mapped: it is read anew when it is needed."""
        for mapped in cls._mapped:
            if hasattr(mapped, "madvise"):
                mapped.madvise(mmap.MADV_DONTNEED)


def _bytes_of(rows: Tensor) -> Iterator[memoryview]:
    return map(memoryview, rows.view(torch.uint8).numpy())
