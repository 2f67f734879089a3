"""Held-out clients: kept out of training, and evaluated like clients that arrive later."""

import difflib
import unicodedata
from collections.abc import Sequence

import torch
from torch import Tensor

from pl_fed.random import key, random_bits
from pl_fed.text import escape_controls

HeldOut = int | float | list[str]
"""A number of clients, a share of them, or the names of their owners."""

_PATH = "data.held_out_clients"
_NAMED = 5  # names in a message


def check_held_out(held_out: object) -> None:
    """Refuse anything but a number of clients, a share of them, a list of owners, or ``None``.

    Raises:
        TypeError: If it is of another type.
        ValueError: If the number is below 1, the share not between 0 and 1, or the list empty.
    """
    if held_out is None:
        return
    if isinstance(held_out, list) and all(isinstance(name, str) for name in held_out):
        if not held_out:
            raise ValueError(
                f"Expected argument `{_PATH}` to name at least one owner but got an empty list:"
                " leave it out to train all clients."
            )
        return
    is_number = isinstance(held_out, int | float) and not isinstance(held_out, bool)
    if not is_number:
        raise TypeError(
            f"Expected argument `{_PATH}` to be a share such as 0.2, a number of clients, or a"
            f" list of owners' names, but got {held_out!r}."
        )
    if isinstance(held_out, int) and held_out < 1:
        raise ValueError(
            f"Expected argument `{_PATH}` to be at least 1 client but got {held_out}: leave it out"
            " to train all clients."
        )
    if isinstance(held_out, float) and not 0 < held_out < 1:
        raise ValueError(
            f"Expected argument `{_PATH}` to be a number of clients, or a share between 0 and 1,"
            f" but got {held_out}: set a share such as 0.2; clients must remain for training."
        )


def mark_held_out(
    held_out: HeldOut, num_clients: int, owners: Sequence[Sequence[str]], seed: int
) -> Tensor:
    """Return a mask of the held-out clients, bool [clients].

    The seed draws a number or a share of the clients, all sets equally likely. A smaller number
    draws a part of the clients of a larger one. A share is rounded to the nearest number, at least
    1.

    Args:
        held_out: The number or share of the held-out clients, or the names of their owners.
        num_clients: Number of clients.
        owners: The names of the owners of each client; empty if the data record none.
        seed: The seed of the data.

    Raises:
        ValueError: If no client would remain for training, or no client has an owner of a name.

    Example:
        >>> mark_held_out(0.5, num_clients=4, owners=(), seed=0).sum()
        tensor(2)
        >>> mark_held_out(["b"], num_clients=2, owners=[["a"], ["b"]], seed=0)
        tensor([False,  True])
    """
    if isinstance(held_out, list):
        marked = _mark_owners(held_out, num_clients, owners)
    else:
        number = held_out
        if isinstance(held_out, float):
            number = max(1, int(held_out * num_clients + 0.5))
        order = random_bits(key(seed, "held-out clients"), torch.arange(num_clients)).argsort()
        marked = torch.zeros(num_clients, dtype=torch.bool)
        marked[order[: int(number)]] = True
    if marked.all():
        raise ValueError(
            f"Expected argument `{_PATH}` to leave clients for training but got"
            f" {_describe(held_out)}, which holds out all {num_clients} clients: hold out fewer,"
            " for example 0.2."
        )
    return marked


def _mark_owners(names: list[str], num_clients: int, owners: Sequence[Sequence[str]]) -> Tensor:
    """Return a mask of the clients with an owner of one of the names, bool [clients]."""
    if not owners:
        raise ValueError(
            f"Expected argument `{_PATH}` to be a number or a share, because the clients of these"
            f" data have no owners, but got {_describe(names)}: set a share such as 0.2."
        )
    clients: dict[str, list[int]] = {}
    for client, own_names in enumerate(owners):
        for name in own_names:
            clients.setdefault(unicodedata.normalize("NFC", name), []).append(client)
    marked = torch.zeros(num_clients, dtype=torch.bool)
    for name in (unicodedata.normalize("NFC", name) for name in names):
        if name not in clients:
            similar = difflib.get_close_matches(name, clients, _NAMED) or list(clients)[:_NAMED]
            raise ValueError(
                f"Expected argument `{_PATH}` to list owners of the data but got"
                f" {escape_controls(name)!r}: owners are, for example,"
                f" {', '.join(map(escape_controls, similar))}."
            )
        marked[clients[name]] = True
    return marked


def _describe(held_out: HeldOut) -> str:
    """Return a setting as text; of a long list the first names."""
    if not isinstance(held_out, list):
        return str(held_out)
    names = ", ".join(map(escape_controls, held_out[:_NAMED]))
    return f"[{names}{', ...' if len(held_out) > _NAMED else ''}]"
