"""Copies to a device that do not wait for its work, and errors about devices and memory."""

import re
from typing import Any

import torch
from torch import Tensor

_REMEDY = (
    "The trial before training runs on the CPU, where this does not fail: make tensors on the"
    " device of the inputs, such as torch.zeros(3, device=x.device), and register constants as"
    " buffers."
)
_TWO_DEVICES = re.compile(
    r"same device|different devices|expected device|device type for generator|cuda\.\w+Tensor"
)
_NO_CPU_MEMORY = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory")


def is_about_devices(error: Exception) -> bool:
    """Return whether the message of an error is about tensors on two devices.

    Example:
        >>> is_about_devices(RuntimeError("Expected all tensors to be on the same device"))
        True
        >>> is_about_devices(ValueError("R2 of one sample"))
        False
    """
    return bool(_TWO_DEVICES.search(str(error)))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python, NumPy or torch raised an error because memory was short.

    torch has a class of its own for the memory of a device, and none for that of the CPU.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("singular matrix"))
        (True, False)
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and bool(_NO_CPU_MEMORY.search(str(error)))
    )


def note_devices(error: Exception) -> None:
    """Add a note with a remedy to an error about tensors on two devices, once.

    Other errors stay as they are.
    """
    if is_about_devices(error) and _REMEDY not in getattr(error, "__notes__", []):
        error.add_note(_REMEDY)


def to_device(tensor: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor on the device of another tensor.

    A plain copy to a GPU first waits for all work that is queued there. A copy from pinned memory
    joins the queue.

    Args:
        tensor: The tensor, on the CPU as a rule.
        like: A tensor on the target device.
        dtype: The dtype of the result; by default that of ``tensor``.

    Example:
        >>> to_device(torch.tensor([1, 2]), like=torch.zeros(3), dtype=torch.float32)
        tensor([1., 2.])
    """
    if tensor.device == like.device or not like.is_cuda:
        return tensor.to(like.device, dtype or tensor.dtype)
    return tensor.to(dtype or tensor.dtype).pin_memory().to(like.device, non_blocking=True)


def move_positions(positions: slice | Tensor, like: Tensor) -> slice | Tensor:
    """Return positions on the device of the tensor that they index; a slice has no device.

    Example:
        >>> move_positions(slice(2), like=torch.zeros(3))
        slice(None, 2, None)
    """
    return positions if isinstance(positions, slice) else to_device(positions, like)


def numbers_on(like: Tensor, numbers: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers, possibly in nested lists, as a tensor on the device of another tensor.

    Example:
        >>> numbers_on(torch.zeros(1), [[1, 2], [3, 4]]).shape
        torch.Size([2, 2])
    """
    tensor = torch.tensor(numbers, dtype=dtype)
    return to_device(tensor, like) if like.is_cuda else tensor.to(like.device)
