"""Clients of a chunk that raise an exception: found, and replaced by others."""

from collections.abc import Callable, Container

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


def replace_failed(positions: Tensor, failed: Container[int]) -> tuple[Tensor, Tensor]:
    """Return the positions of a chunk with another client in place of one that fails.

    A stack then keeps its shape, and the others their numbers.

    Args:
        positions: The positions of the clients, int64 [clients].
        failed: The positions of the clients that fail.

    Returns:
        The positions, empty if all clients fail; and the mask of the others, bool [clients].

    Example:
        >>> replace_failed(torch.tensor([3, 4, 5]), {3})
        (tensor([4, 4, 5]), tensor([False,  True,  True]))
    """
    others = torch.tensor([position not in failed for position in positions.tolist()])
    if not others.any():
        return positions[:0], others
    return torch.where(others, positions, positions[others][0]), others
