"""The store of client states between rounds: one row for each client and state name."""

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
    """Client store: rows by client id and state name, in memory, and on disk beyond a budget.

    A client without a written row has the default row, and uses no memory.

    Args:
        num_clients: Number of clients.
        defaults: By name, the row of a client before its first write, shape [numel].
        directory: Folder for files that hold all rows. The files disappear when the process ends.
            ``None`` keeps rows in memory within the budget: on the device of the defaults, then on
            the CPU. Further rows go to the folder for temporary files (``TMPDIR``, or
            ``/var/tmp``).
        memory: The budget on each device: a share of the memory that is free now, in (0, 1]
            (float), or a number of bytes (int). The store allocates blocks of rows of at most
            64 MiB.
        sharers: Number of processes with a store on this machine. They share the free memory of
            the CPU.

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
        with torch.inference_mode(False):  # inference tensors cannot be written outside that mode
            self.defaults = {name: row.detach().clone() for name, row in defaults.items()}
        self._directory = None if directory is None else Path(directory)
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
        devices = [*(row.device for row in self.defaults.values()), torch.device("cpu")]
        self._budget = {
            device: memory if isinstance(memory, int) else int(memory * _own_share(device, sharers))
            for device in dict.fromkeys(devices if directory is None else [])
        }
        self._tables = self._new_tables()

    @property
    def on_disk(self) -> bool:
        """Whether some rows are on disk."""
        return any(table.disk is not None for table in self._tables.values())

    @property
    def is_empty(self) -> bool:
        """Whether no client has a written row."""
        return not any(len(table.clients()) for table in self._tables.values())

    def move_defaults(self, device: torch.device) -> None:
        """Move the defaults, and with them the rows that :meth:`read` returns, to a device."""
        for name, row in self.defaults.items():
            if row.device != device:
                with torch.inference_mode(False):
                    self.defaults[name] = self._tables[name].default = row.to(device)

    def read(self, name: str, clients: Tensor) -> Tensor:
        """Return copies of the clients' rows, shape [clients, numel], on the device of the default.

        Args:
            name: The name of the state.
            clients: Client ids, int64 [clients].
        """
        return self._tables[name].read(clients.cpu())

    def write(self, name: str, clients: Tensor, rows: Tensor) -> None:
        """Write the clients' rows.

        Args:
            name: The name of the state.
            clients: Client ids, int64 [clients].
            rows: Shape [clients, numel].

        Raises:
            OSError: If the rows go to a disk, and it is full.
        """
        self._tables[name].write(clients.cpu(), rows)

    def prefetch(self, clients: Tensor) -> None:
        """Let the system read the clients' rows from disk in the background."""
        for table in self._tables.values():
            table.prefetch(clients.cpu())

    def state_dict(self) -> dict[str, Any]:
        """Return the defaults and the written rows, for a checkpoint.

        Most rows are not copied: save them before the store changes.

        Returns:
            For each name ``default``, ``clients`` [n] in the order of their first write, and
            ``rows``, a list of tensors [rows, numel] with n rows in total.
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
        """Restore a state that :meth:`state_dict` returned.

        Raises:
            ValueError: If names, lengths of rows or clients differ from this store's. The store is
                then unchanged.
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
        free_bytes = dict(self._budget)

        def choose_device(size: int) -> torch.device | None:
            """Return the first device with enough free bytes for a block."""
            for device, free in free_bytes.items():
                if size <= free:
                    free_bytes[device] -= size
                    return device
            return None

        with torch.inference_mode(False):  # inference tensors cannot be written outside that mode
            return {
                name: RowTable(self.num_clients, row, choose_device, self._folder)
                for name, row in self.defaults.items()
            }

    def _folder(self) -> Path:
        return _temporary_folder() if self._directory is None else self._directory


def check_saved(name: str, saved: Any) -> None:
    """Raise ``ValueError`` unless a saved state has the form of ``ClientStore.state_dict``.

    Args:
        name: The name of the state.
        saved: The saved ``default``, ``clients`` and ``rows``.
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
            f" got {type(saved).__name__} of another form."
        )
    lengths = {piece.shape[1] for piece in rows} | {len(default)}
    if len(lengths) > 1 or sum(map(len, rows)) != len(clients):
        raise ValueError(
            f"Expected the saved state {name!r} to have a row of {len(default)} numbers for each of"
            f" {len(clients)} clients but got {[list(piece.shape) for piece in rows[:3]]}."
        )
    if len(clients.unique()) < len(clients) or (len(clients) and int(clients.min()) < 0):
        raise ValueError(
            f"Expected the saved state {name!r} to have different client ids of at least 0 but got"
            " repeated or negative ones."
        )


def check_states(
    state: Mapping[str, Any], num_clients: int, defaults: Mapping[str, Tensor]
) -> None:
    """Raise ``ValueError`` unless saved states fit a store.

    Args:
        state: The result of :meth:`ClientStore.state_dict`.
        num_clients: The store's number of clients.
        defaults: The store's default rows by name.
    """
    if set(state) != set(defaults):
        raise ValueError(
            f"Expected the saved client states to be {sorted(defaults)} but got {sorted(state)}."
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
                f"Expected the saved state {name!r} to have client ids from 0 to {num_clients - 1}"
                f" but got {last}."
            )


def select_clients(
    state: Mapping[str, Any], is_selected: Callable[[Tensor], Tensor]
) -> dict[str, dict[str, Any]]:
    """Return the saved states of some clients.

    Rows of other clients are not read if they are mapped from a file.

    Args:
        state: The result of :meth:`ClientStore.state_dict`.
        is_selected: Maps ids, int64 [n], to a mask of the selected ones, bool [n].

    Example:
        >>> store = ClientStore(3, {"personal": torch.zeros(2)})
        >>> store.write("personal", torch.tensor([1, 2]), torch.ones(2, 2))
        >>> select_clients(store.state_dict(), lambda ids: ids > 1)["personal"]["clients"]
        tensor([2])
    """
    return {
        name: _select_rows(saved, is_selected(saved["clients"])) for name, saved in state.items()
    }


def _select_rows(saved: Mapping[str, Any], selected: Tensor) -> dict[str, Any]:
    masks = selected.split([len(rows) for rows in saved["rows"]])
    pieces = [(rows, mask) for rows, mask in zip(saved["rows"], masks) if mask.any()]
    rows = [piece if mask.all() else piece[mask] for piece, mask in pieces]
    return {**saved, "clients": saved["clients"][selected], "rows": rows}


def _own_share(device: torch.device, sharers: int) -> float:
    """Return this process's share of a device's free bytes: every process has its own GPU."""
    return free_memory(device) / (sharers if device.type == "cpu" else 1)


def _temporary_folder() -> Path:
    """Return a folder for large files; not ``/tmp``, because many systems keep it in memory."""
    folder = os.environ.get("TMPDIR", "/var/tmp")
    return Path(folder if os.access(folder, os.W_OK) else tempfile.gettempdir())
