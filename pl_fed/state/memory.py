"""How much memory is free: on a GPU, in the machine, and in what a container or a job may use."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

# of control groups, by version: their folder, limit and use, and the part of it that is file cache
_VERSIONS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device: on the CPU no more than the process's own limits leave."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_of_machine(), *left_to_groups()])


def _of_machine() -> int:
    try:
        with open("/proc/meminfo") as lines:
            values = dict(line.split(":", 1) for line in lines)
        return int(values["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def left_to_groups(
    own: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Yield the bytes that Linux control groups have left, which hold containers and batch jobs.

    Args:
        own: File that says which groups the process is in.
        mounted: Folder of all groups, of version 1 or 2.

    Yields:
        Of each group that the process is in, and of those around it, what its limit leaves; the
        file cache that can be dropped is not taken for used. A group without a limit leaves more
        than any machine has (version 1), or is left out.
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
                left = (_left_to(group, *names) for group in groups)
                yield from (each for each in left if each is not None)


def _left_to(group: Path, limit: str, use: str, cache: str) -> int | None:
    try:
        most, used = (int((group / name).read_text()) for name in (limit, use))
        words = (group / "memory.stat").read_text().split()
    except (OSError, ValueError):  # outside of the container, or "max", which is no limit
        return None
    dropped = dict(zip(words[::2], words[1::2])).get(cache, 0)
    return max(most - used + int(dropped), 0)
