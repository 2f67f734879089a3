"""Hints to the operating system about memory pages."""

import ctypes
import mmap
from contextlib import suppress

from torch import Tensor

_MADV_PAGEOUT = 21  # from mman.h


def page_out(rows: Tensor) -> None:
    """Tell the system that rows are not needed soon, so that pages mapped from a file leave memory.

    No data is lost. Only Linux 5.4 and later supports the hint; other systems ignore it.
    """
    begin = -(-rows.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = rows.data_ptr() + rows.nbytes - begin
    if rows.device.type == "cpu" and size > 0:
        with suppress(OSError, AttributeError):  # not Linux
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _MADV_PAGEOUT)
