"""Memory maps as tensors: files of arrays, of which only the rows in use are in memory."""

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_fed.trees import Tree

_TYPES = (
    "bool, uint8, a signed integer or a floating-point number of at most 64 bits, in the byte order"
    " of this machine,"
)


def holds_memory_map(tree: Any) -> bool:
    """Return whether a leaf of a tree is a ``numpy.memmap``."""
    if isinstance(tree, dict | tuple | list):
        return any(map(holds_memory_map, tree.values() if isinstance(tree, dict) else tree))
    return isinstance(tree, np.memmap)


def tensors_of_memory_maps(tree: Any) -> Tree:
    """Return a tree with memory maps as tensors that share their files; never write to them.

    Raises:
        TypeError: If torch has no such type.

    Example:
        >>> tensors_of_memory_maps((torch.zeros(1), 3))
        (tensor([0.]), 3)
    """
    if isinstance(tree, dict):
        return {name: tensors_of_memory_maps(branch) for name, branch in tree.items()}
    if isinstance(tree, tuple | list):
        branches = [tensors_of_memory_maps(branch) for branch in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)
    if not isinstance(tree, np.memmap):
        return tree
    kind = tree.dtype
    is_unsigned = kind.kind == "u" and kind.itemsize > 1  # torch does not gather their rows
    if kind.kind not in "biuf" or is_unsigned or kind.itemsize > 8 or not kind.isnative:
        raise TypeError(
            f"Expected a memory map to hold {_TYPES} but got {kind}: write another type."
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.from_numpy(tree)


def allocate_in_memory(count: int, leaf: Tensor) -> Tensor:
    """Return room for samples like the rows of a tensor, in memory."""
    return leaf.new_empty((count, *leaf.shape[1:]))


def allocate_on_disk(count: int, leaf: Tensor) -> Tensor:
    """Return room for samples like the rows of a tensor, in a temporary file.

    The file is deleted at once, so that it vanishes with the tensor, even after a crash. Its folder
    is that of :mod:`tempfile`: set ``TMPDIR`` to a folder on a disk with enough space.

    Raises:
        OSError: If the disk has too little space.
    """
    number = count * leaf[:1].numel()
    folder = Path(tempfile.gettempdir())
    needed, free = number * leaf.itemsize, shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"Expected the disk of {folder} to have space for {needed / 2**30:.1f} GiB of samples"
            f" but it has {free / 2**30:.1f} GiB: set the environment variable TMPDIR to a folder"
            " on a larger disk."
        )
    if not number:
        return allocate_in_memory(count, leaf)
    with tempfile.NamedTemporaryFile(prefix="pl_fed_", dir=folder) as file:
        rows = torch.from_file(file.name, shared=True, size=number, dtype=leaf.dtype)
    return rows.view(count, *leaf.shape[1:])
