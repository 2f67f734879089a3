"""The store: what each client keeps between rounds, one row per client and name."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pl_fed.state._paging import page_out
from pl_fed.state.memory import free_memory
from pl_fed.state.row_table import RowTable


class ClientStore:
    """Rows of tensors by client id and name: in memory, and beyond a budget on disk.

    A client that was never written reads as the default and costs nothing.

    Args:
        num_clients: Number of clients.
        defaults: For each name the row, shape [numel], that a client has before it is written.
        directory: Folder for files that hold all rows, which nothing is left of when the process
            ends. ``None`` keeps rows in memory as long as they are within the budget: on the
            defaults' device, then on the CPU. What is beyond goes to the folder for temporary
            files (``TMPDIR``, or ``/var/tmp``).
        memory: The budget: a share of what is free now, in (0, 1], or so many bytes (int), of each
            device. It is used in blocks of rows, up to 64 MiB each.
        sharers: Processes that each have such a store, and share what is free on the CPU.

    Example:
        >>> store = ClientStore(3, {"personal": torch.zeros(2)})
        >>> store.write("personal", torch.tensor([1]), torch.ones(1, 2))
        >>> store.read("personal", torch.tensor([0, 1])).tolist()
        [[0.0, 0.0], [1.0, 1.0]]
    """

    def __init__(
        self,
        num_clients: int,
        defaults: Mapping[str, Tensor],
        directory: str | Path | None = None,
        memory: int | float = 0.5,
        sharers: int = 1,
    ) -> None:
        self.num_clients = num_clients
        with torch.inference_mode(False):  # rows made within it could not be written without
            self.defaults = {name: row.detach().clone() for name, row in defaults.items()}
        self._directory = None if directory is None else Path(directory)
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
        devices = [*(row.device for row in self.defaults.values()), torch.device("cpu")]
        self._budget = {
            each: memory if isinstance(memory, int) else int(memory * _own_share(each, sharers))
            for each in dict.fromkeys(devices if directory is None else [])
        }
        self._tables = self._new_tables()

    @property
    def on_disk(self) -> bool:
        """Whether some rows are on disk."""
        return any(table.disk is not None for table in self._tables.values())

    @property
    def is_empty(self) -> bool:
        """Whether all clients are as they were at first."""
        return not any(len(table.clients()) for table in self._tables.values())

    def read(self, name: str, clients: Tensor) -> Tensor:
        """Return copies of the clients' rows, shape [clients, numel], on the default's device."""
        return self._tables[name].read(clients.cpu())

    def write(self, name: str, clients: Tensor, rows: Tensor) -> None:
        """Keep the clients' rows, shape [clients, numel].

        Raises:
            OSError: If they go to a disk, and it is full.
        """
        self._tables[name].write(clients.cpu(), rows)

    def prefetch(self, clients: Tensor) -> None:
        """Let the system fetch the clients' rows from disk while something else is done."""
        for table in self._tables.values():
            table.prefetch(clients.cpu())

    def state_dict(self) -> dict[str, Any]:
        """Return the defaults and the rows that were written, for a checkpoint.

        Most rows are not copied: save them before the store changes.

        Returns:
            For each name ``default``, ``clients`` [n] in the order of their first write, and
            ``rows``, a list of tensors [rows, numel] that have n rows together.
        """
        return {
            name: {
                "default": self.defaults[name].cpu().clone(),
                "clients": table.clients(),
                "rows": table.pieces(),
            }
            for name, table in self._tables.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            ValueError: If names, lengths of rows or clients differ from this store's; it is then
                left as it was.
        """
        check_states(state, self.num_clients, self.defaults)
        self._tables = self._new_tables()
        for name, saved in state.items():
            self.defaults[name].copy_(saved["default"])
            sizes = [len(rows) for rows in saved["rows"]]
            for clients, rows in zip(saved["clients"].split(sizes), saved["rows"]):
                self.write(name, clients, rows)
                page_out(rows)

    def _new_tables(self) -> dict[str, RowTable]:
        left = dict(self._budget)

        def room(size: int) -> torch.device | None:
            """Return the device for a block; the first that has room."""
            for device, free in left.items():
                if size <= free:
                    left[device] -= size
                    return device
            return None

        with torch.inference_mode(False):  # what is made within it could not be written without
            return {
                name: RowTable(self.num_clients, row, room, self._folder)
                for name, row in self.defaults.items()
            }

    def _folder(self) -> Path:
        return _temporary_folder() if self._directory is None else self._directory


def check_saved(name: str, saved: Any) -> None:
    """Raise ``ValueError`` unless saved rows are of the form that :class:`ClientStore` gives them.

    Args:
        name: The state that they are of.
        saved: What may be ``default``, ``clients`` and ``rows``; see ``ClientStore.state_dict``.
    """
    default, clients, rows = (
        saved.get(part) if isinstance(saved, Mapping) else None
        for part in ("default", "clients", "rows")
    )
    if (
        not (isinstance(default, Tensor) and default.dim() == 1)
        or not (isinstance(clients, Tensor) and clients.dim() == 1)
        or not isinstance(rows, list)
        or not all(isinstance(piece, Tensor) and piece.dim() == 2 for piece in rows)
        or clients.dtype != torch.int64
    ):
        raise ValueError(
            f"Expected the saved state {name!r} to have a default row, ids of clients and rows but"
            " got something else."
        )
    lengths = {piece.shape[1] for piece in rows} | {len(default)}
    if len(lengths) > 1 or sum(map(len, rows)) != len(clients):
        raise ValueError(
            f"Expected the saved state {name!r} to have a row of {len(default)} numbers for each of"
            f" {len(clients)} clients but got {[list(piece.shape) for piece in rows[:3]]}."
        )
    if len(clients.unique()) < len(clients) or (len(clients) and int(clients.min()) < 0):
        raise ValueError(
            f"Expected the saved state {name!r} to be of different clients with ids of at least 0"
            " but got others."
        )


def check_states(
    state: Mapping[str, Any], num_clients: int, defaults: Mapping[str, Tensor]
) -> None:
    """Raise ``ValueError`` unless saved states are those of a store.

    Args:
        state: What :meth:`ClientStore.state_dict` gave.
        num_clients: The store's number of clients.
        defaults: The store's default row by name.
    """
    if set(state) != set(defaults):
        raise ValueError(
            f"Expected saved clients' states to be {sorted(defaults)} but got {sorted(state)}."
        )
    for name, saved in state.items():
        check_saved(name, saved)
        if saved["default"].shape != defaults[name].shape:
            raise ValueError(
                f"Expected the saved state {name!r} to have rows of {defaults[name].numel()}"
                f" numbers but got {saved['default'].numel()}."
            )
        last = int(saved["clients"].max()) if len(saved["clients"]) else 0
        if last >= num_clients:
            raise ValueError(
                f"Expected the saved state {name!r} to be of clients from 0 to {num_clients - 1}"
                f" but got {last}."
            )


def of_clients(
    state: Mapping[str, Any], chosen: Callable[[Tensor], Tensor]
) -> dict[str, dict[str, Any]]:
    """Return of what :meth:`ClientStore.state_dict` gave the rows of some clients.

    Others are not read, where they are mapped from a file.

    Args:
        state: What it gave.
        chosen: Says for ids, int64 [n], which are wanted, bool [n].

    Example:
        >>> store = ClientStore(3, {"personal": torch.zeros(2)})
        >>> store.write("personal", torch.tensor([1, 2]), torch.ones(2, 2))
        >>> of_clients(store.state_dict(), lambda ids: ids > 1)["personal"]["clients"]
        tensor([2])
    """
    return {name: _of_clients(saved, chosen(saved["clients"])) for name, saved in state.items()}


def _of_clients(saved: Mapping[str, Any], wanted: Tensor) -> dict[str, Any]:
    pieces = wanted.split([len(rows) for rows in saved["rows"]])
    chosen = [(each, here) for each, here in zip(saved["rows"], pieces) if here.any()]
    rows = [each if here.all() else each[here] for each, here in chosen]
    return {**saved, "clients": saved["clients"][wanted], "rows": rows}


def _own_share(device: torch.device, sharers: int) -> float:
    """Return a process's part of the free bytes of a device: each has a GPU of its own."""
    return free_memory(device) / (sharers if device.type == "cpu" else 1)


def _temporary_folder() -> Path:
    """Return a folder for large files: ``/tmp`` itself is in memory on many systems."""
    chosen = os.environ.get("TMPDIR", "/var/tmp")
    return Path(chosen if os.access(chosen, os.W_OK) else tempfile.gettempdir())
