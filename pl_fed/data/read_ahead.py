"""Reading ahead: the system reads rows of memory maps while a program works on other rows."""

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pl_fed.trees import Tree, leaves

_WILLNEED, _POPULATE_READ = 3, 22  # MADV_WILLNEED and MADV_POPULATE_READ, from Linux's mman.h
_REQUEST = 1 << 20  # bytes of one request: the system may truncate longer requests
_LIMIT = 1 << 30  # largest number of bytes that are read ahead, so that other rows stay in memory


def read_ahead(tree: Tree, find_rows: Callable[[], Tensor]) -> threading.Thread:
    """Read rows of memory maps in a background thread, which changes no number.

    The thread asks the system to load the rows into its file cache and to map them. The program
    then finds them there, or loads them by itself. At most 1 GiB is read, in the order of use.
    Systems other than Linux ignore the request.

    Args:
        tree: Tensors of memory maps, on the CPU.
        find_rows: Returns the positions of the rows in their order of use, int64 [n]. The thread
            calls it.

    Returns:
        The thread, already started.

    Example:
        >>> read_ahead(torch.zeros(3, 2), lambda: torch.tensor([2, 0])).join()
    """

    def read() -> None:
        """Read the rows of each tensor."""
        index = find_rows()
        for leaf in leaves(tree):
            _advise(leaf, index)

    thread = threading.Thread(target=read, name="pl_fed read ahead", daemon=True)
    thread.start()
    return thread


def page_ranges(leaf: Tensor, index: Tensor) -> list[tuple[int, int]]:
    """Return the ranges of memory pages that hold rows: merged, in ascending order.

    Args:
        leaf: A contiguous tensor [samples, ...].
        index: Positions of rows, int64 [n].

    Returns:
        The address of the first byte and the number of bytes of each range, whole pages.
    """
    row_bytes = leaf[:1].nbytes
    first = leaf.data_ptr() + index.unique() * row_bytes
    begins = first // mmap.PAGESIZE
    ends = (first + row_bytes - 1) // mmap.PAGESIZE + 1
    is_gap = torch.ones(len(begins) + 1, dtype=torch.bool)
    is_gap[1:-1] = begins[1:] > ends[:-1]
    pages = torch.stack([begins[is_gap[:-1]], ends[is_gap[1:]] - begins[is_gap[:-1]]], dim=1)
    return [(begin, size) for begin, size in (pages * mmap.PAGESIZE).tolist()]


def _advise(leaf: Tensor, index: Tensor) -> None:
    """Load the rows of a tensor: first all requests to the disk, then the pages."""
    row_bytes = leaf[:1].nbytes
    if not row_bytes or not len(index) or not leaf.is_contiguous():
        return
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError, TypeError):  # not a Unix system
        return
    ranges = page_ranges(leaf, index[: max(1, _LIMIT // row_bytes)])
    for advice in (_WILLNEED, _POPULATE_READ):
        for begin, size in _requests(ranges):
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), advice)


def _requests(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for begin, size in ranges:
        for done in range(0, size, _REQUEST):
            yield begin + done, min(_REQUEST, size - done)
