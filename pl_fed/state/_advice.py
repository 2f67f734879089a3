"""What the system is told about memory."""

import ctypes
import mmap
from contextlib import suppress

from torch import Tensor

HUGE_PAGES = 14  # of mman.h: it is got in fewer pieces
PAGE_OUT = 21  # it is not needed soon: what is mapped from a file leaves memory


def advise(rows: Tensor, advice: int) -> None:
    """Tell Linux about the pages that lie within a tensor on the CPU; nothing in it changes."""
    begin = -(-rows.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = rows.data_ptr() + rows.nbytes - begin
    if rows.device.type == "cpu" and size > 0:
        with suppress(OSError, AttributeError):  # another system
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), advice)
