"""Clients that raise an exception: which ones of a chunk."""

from collections.abc import Callable

import torch
from torch import Tensor


def find_failed(
    train: Callable[[Tensor], object], positions: Tensor, error: Exception
) -> dict[int, Exception]:
    """Return the exceptions of the clients of a chunk that fail alone, by their positions.

    Args:
        train: Trains clients, by their positions.
        positions: The positions of the clients in the chunk.
        error: The exception of the chunk.

    Raises:
        Exception: The exception of the chunk if no client fails alone.
    """
    if len(positions) == 1:
        return {int(positions): error}
    failed: dict[int, Exception] = {}
    for position in positions.tolist():
        try:
            train(torch.tensor([position]))
        except torch.OutOfMemoryError:
            raise
        except Exception as own_error:
            failed[position] = own_error
    if not failed:
        raise error
    return failed
