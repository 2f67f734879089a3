"""Rows in an anonymous file, read and written row by row without use of memory."""

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

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # also a quota, or a limit of files
_READ_AHEAD = 1 << 20  # bytes of one request: the system truncates longer requests


class DiskRows:
    """Disk rows: rows in an anonymous file, deleted by the system even after a crash or a kill.

    Rows pass through the file cache of the system. The system shrinks this cache when programs need
    memory.

    Args:
        row: A row with the dtype and shape [numel] of all rows.
        folder: The folder of the file.

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
        self._file = tempfile.TemporaryFile(  # noqa: SIM115 (open during the object's life)
            prefix="pl_fed_", dir=folder, buffering=0
        )

    def read(self, positions: list[int]) -> Tensor:
        """Return the rows at ``positions``, shape [positions, numel], on the CPU."""
        rows = torch.empty(len(positions), self.numel, dtype=self.dtype)
        for position, row in zip(positions, _row_bytes(rows)):
            done = 0
            while done < len(row):
                begin = position * self.row_bytes + done
                size = os.preadv(self._file.fileno(), [row[done:]], begin)
                if not size:
                    raise OSError(f"Expected row {position} of the clients' states but got none.")
                done += size
        return rows

    def write(self, positions: list[int], rows: Tensor) -> None:
        """Write rows, shape [positions, numel], at ``positions``.

        Raises:
            OSError: If the disk is full, or the user's share of it.
        """
        try:
            for position, row in zip(positions, _row_bytes(rows.contiguous())):
                done = 0
                while done < len(row):
                    begin = position * self.row_bytes + done
                    done += os.pwrite(self._file.fileno(), row[done:], begin)
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            raise OSError(
                f"Expected the disk of the clients' states ({self.folder}) to have room for"
                f" {len(positions)} rows of {self.row_bytes / 2**20:.1f} MiB but got:"
                f" {error.strerror}: set `federation.storage.folder` to a folder on a larger disk."
            ) from error

    def prefetch(self, positions: list[int]) -> None:
        """Let the system read the rows at ``positions`` in the background."""
        if not hasattr(os, "posix_fadvise"):
            return
        for position in positions:
            first = position * self.row_bytes
            for begin in range(first, first + self.row_bytes, _READ_AHEAD):
                size = min(_READ_AHEAD, first + self.row_bytes - begin)
                os.posix_fadvise(self._file.fileno(), begin, size, os.POSIX_FADV_WILLNEED)

    def pieces(self, count: int, rows: int) -> Iterator[Tensor]:
        """Yield the first ``count`` rows in pieces of ``rows`` rows, mapped from the file.

        Do not write to the pieces. They change when the file changes.
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
        """Release the memory of all mapped pieces; the system reads them again on demand."""
        for mapped in cls._mapped:
            if hasattr(mapped, "madvise"):
                mapped.madvise(mmap.MADV_DONTNEED)


def _row_bytes(rows: Tensor) -> Iterator[memoryview]:
    return map(memoryview, rows.view(torch.uint8).numpy())
