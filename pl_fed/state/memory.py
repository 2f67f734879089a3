"""Memory: what is free on a GPU or the machine, within limits; and freed blocks that are kept."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

# control groups by version: folder, and names of the limit, the usage, and the file cache in it
_VERSIONS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device; on the CPU, within the limits of the process."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_machine_memory(), *control_group_memory()])


def total_memory(device: torch.device) -> int:
    """Return the bytes of a device, in use or free; on the CPU, those of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return _machine_memory("MemTotal")


def _machine_memory(name: str = "MemAvailable") -> int:
    """Return an entry of Linux' table of the machine's memory, in bytes."""
    try:
        with open("/proc/meminfo") as lines:
            values = dict(line.split(":", 1) for line in lines)
        return int(values[name].split()[0]) * 1024
    except (OSError, KeyError):
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def control_group_memory(
    own: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Yield the free bytes of the process's Linux control groups (limits of containers and jobs).

    Args:
        own: The file with the control groups of the process.
        mounted: The folder of all control groups, of version 1 or 2.

    Yields:
        The free bytes below the limit of each group of the process and of each enclosing group.
        File cache that can be dropped counts as free. A group without a limit has more free bytes
        than any machine (version 1), or is skipped.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:  # not Linux
        return
    for folder, *names in _VERSIONS:
        for _, controllers, path in lines:
            if folder in controllers.split(","):
                inner = Path(path.lstrip("/"))
                groups = (mounted / folder / group for group in (inner, *inner.parents))
                free = (_group_memory(group, *names) for group in groups)
                yield from (size for size in free if size is not None)


def _group_memory(group: Path, limit: str, usage: str, file_cache: str) -> int | None:
    try:
        maximum, used = (int((group / name).read_text()) for name in (limit, usage))
        words = (group / "memory.stat").read_text().split()
    except (OSError, ValueError):  # outside the container, or "max" for no limit
        return None
    dropped = dict(zip(words[::2], words[1::2])).get(file_cache, 0)
    return max(maximum - used + int(dropped), 0)


@cache
def keep_freed_memory() -> None:
    """Let glibc keep freed blocks for the next round, up to 256 MB.

    By default glibc returns them to the system and requests them again page by page. This takes up
    to a third of a round for small models.
    """
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_M_MMAP_THRESHOLD, 1 << 25)
        mallopt(_M_TRIM_THRESHOLD, 1 << 28)
