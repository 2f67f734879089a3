"""The store: what each client keeps between rounds, one row per client and name."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SHARE_OF_MEMORY = 0.5  # rows that would fill more than this of the free memory go to disk


class ClientStore:
    """Rows of tensors by client id and name, in memory or mapped from disk.

    A client that was never written reads as the default and costs nothing: pages of memory (and of
    a sparse file) come into being when they are written.

    Args:
        num_clients: Number of clients.
        defaults: For each name the row, shape [numel], that a client has before it is written.
        directory: Where to put memory-mapped files; ``None`` keeps the rows in memory unless they
            would fill more than half of what is free, and then uses the system's temporary folder.

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
    ) -> None:
        self.num_clients = num_clients
        self.defaults = {name: row.detach().clone() for name, row in defaults.items()}
        self._written = {name: torch.zeros(num_clients, dtype=torch.bool) for name in self.defaults}
        self._folder = self._choose_folder(directory)
        self._rows = {name: self._allocate(name, row) for name, row in self.defaults.items()}

    @property
    def on_disk(self) -> bool:
        """Whether the rows are mapped from files."""
        return self._folder is not None

    def read(self, name: str, clients: Tensor) -> Tensor:
        """Return copies of the clients' rows, shape [clients, numel], on the default's device."""
        default = self.defaults[name]
        clients = clients.cpu()
        written = self._written[name][clients]
        if not written.any():
            return default.expand(len(clients), -1).clone()
        rows = self._rows[name][clients.to(self._rows[name].device)].to(default.device)
        if not written.all():
            rows[~written.to(rows.device)] = default
        return rows

    def write(self, name: str, clients: Tensor, rows: Tensor) -> None:
        """Keep the clients' rows, shape [clients, numel]."""
        store = self._rows[name]
        store[clients.to(store.device)] = rows.detach().to(store)
        self._written[name][clients.cpu()] = True

    def state_dict(self) -> dict[str, Any]:
        """Return the defaults and the rows that were written, for a checkpoint."""
        state = {}
        for name, written in self._written.items():
            clients = written.nonzero().flatten()
            rows = self._rows[name][clients.to(self._rows[name].device)].cpu()
            state[name] = {"default": self.defaults[name].cpu(), "clients": clients, "rows": rows}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            ValueError: If names, lengths of rows or clients differ from this store's.
        """
        if set(state) != set(self.defaults):
            raise ValueError(
                f"Expected argument `state` to hold {sorted(self.defaults)} but got"
                f" {sorted(state)}."
            )
        for name, saved in state.items():
            if saved["default"].shape != self.defaults[name].shape:
                raise ValueError(
                    f"Expected argument `state` to hold rows of {self.defaults[name].numel()}"
                    f" numbers for {name!r} but got {saved['default'].numel()}."
                )
            self.defaults[name].copy_(saved["default"])
            self._written[name].zero_()
            if len(saved["clients"]):
                self.write(name, saved["clients"], saved["rows"])

    def _device(self) -> torch.device:
        return next((row.device for row in self.defaults.values()), torch.device("cpu"))

    def _choose_folder(self, directory: str | Path | None) -> Path | None:
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
            return Path(directory)
        needed = sum(row.nbytes for row in self.defaults.values()) * self.num_clients
        if needed > _SHARE_OF_MEMORY * free_memory(self._device()):
            return Path(tempfile.mkdtemp(prefix="pl_fed_store_"))
        return None

    def _allocate(self, name: str, row: Tensor) -> Tensor:
        shape = (self.num_clients, row.numel())
        if self._folder is None or row.numel() == 0:
            return torch.empty(shape, dtype=row.dtype, device=row.device)
        dtype = torch.empty(0, dtype=row.dtype).numpy().dtype
        path = self._folder / f"{name}.rows"
        mapped = np.memmap(path, dtype=dtype, mode="w+", shape=shape)
        path.unlink()  # the mapping lives on until the process ends, and nothing is left behind
        return torch.from_numpy(mapped)


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as lines:
            values = dict(line.split(":", 1) for line in lines)
        return int(values["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
