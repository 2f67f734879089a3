"""What the system is told about memory."""

import ctypes
import mmap
from contextlib import suppress

from torch import Tensor

_MADV_PAGEOUT = 21  # of mman.h


def page_out(rows: Tensor) -> None:
    """Say that rows are not needed soon: what is mapped from a file leaves memory, nothing is lost.

    Other systems than Linux, since 5.4, do not hear of it.
    """
    begin = -(-rows.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = rows.data_ptr() + rows.nbytes - begin
    if rows.device.type == "cpu" and size > 0:
        with suppress(OSError, AttributeError):  # another system
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _MADV_PAGEOUT)
