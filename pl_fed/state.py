"""The store: what each client keeps between rounds, one row per client and name."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SHARE_OF_MEMORY = 0.5  # rows that would fill more than this of the free memory go elsewhere


class ClientStore:
    """Rows of tensors by client id and name, in memory or mapped from disk.

    A client that was never written reads as the default and costs nothing: pages of memory (and of
    a sparse file) come into being when they are written.

    Args:
        num_clients: Number of clients.
        defaults: For each name the row, shape [numel], that a client has before it is written.
        directory: Where to put memory-mapped files, which nothing is left of when the process ends.
            ``None`` keeps the rows in memory: the defaults' device's, or else the CPU's; if they
            would fill more than half of what is free there, it takes the folder for temporary files
            (``TMPDIR``, or ``/var/tmp``).

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
        with torch.inference_mode(False):  # rows made within it could not be written without
            self.defaults = {name: row.detach().clone() for name, row in defaults.items()}
            self._written = {name: torch.zeros(num_clients, dtype=torch.bool) for name in defaults}
            self._device, self._folder = self._choose_place(directory)
            self._rows = {name: self._allocate(row) for name, row in self.defaults.items()}

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
        rows = self._rows[name][clients.to(self._device)].to(default.device)
        if not written.all():
            rows[~written.to(rows.device)] = default
        return rows

    def write(self, name: str, clients: Tensor, rows: Tensor) -> None:
        """Keep the clients' rows, shape [clients, numel].

        Raises:
            OSError: If the rows are on disk, and it is full.
        """
        store, clients = self._rows[name], clients.cpu()
        if self._folder is not None:
            self._check_disk(int((~self._written[name][clients]).sum()) * store[:1].nbytes)
        store[clients.to(self._device)] = rows.detach().to(store)
        self._written[name][clients] = True

    def state_dict(self) -> dict[str, Any]:
        """Return the defaults and the rows that were written, for a checkpoint."""
        state = {}
        for name, written in self._written.items():
            clients = written.nonzero().flatten()
            rows = self._rows[name][clients.to(self._device)].cpu()
            default = self.defaults[name].detach().cpu().clone()
            state[name] = {"default": default, "clients": clients, "rows": rows}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            ValueError: If names, lengths of rows or clients differ from this store's; it is then
                left as it was.
        """
        if set(state) != set(self.defaults):
            raise ValueError(
                f"Expected argument `state` to hold {sorted(self.defaults)} but got"
                f" {sorted(state)}."
            )
        for name, saved in state.items():
            self._check_saved(name, saved)
        for name, saved in state.items():
            self.defaults[name].copy_(saved["default"])
            self._written[name].zero_()
            if len(saved["clients"]):
                self.write(name, saved["clients"], saved["rows"])

    def _check_saved(self, name: str, saved: Mapping[str, Any]) -> None:
        if saved["default"].shape != self.defaults[name].shape:
            raise ValueError(
                f"Expected argument `state` to hold rows of {self.defaults[name].numel()}"
                f" numbers for {name!r} but got {saved['default'].numel()}."
            )
        last = int(saved["clients"].max()) if len(saved["clients"]) else 0
        if last >= self.num_clients:
            raise ValueError(
                f"Expected argument `state` to hold clients from 0 to {self.num_clients - 1} for"
                f" {name!r} but got {last}."
            )

    def _choose_place(self, directory: str | Path | None) -> tuple[torch.device, Path | None]:
        """Return the device of the rows, and the folder if they are on disk."""
        cpu = torch.device("cpu")
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
            return cpu, Path(directory)
        needed = sum(row.nbytes for row in self.defaults.values()) * self.num_clients
        for device in [*(row.device for row in self.defaults.values()), cpu]:
            if needed <= _SHARE_OF_MEMORY * free_memory(device):
                return device, None
        return cpu, _temporary_folder()

    def _allocate(self, row: Tensor) -> Tensor:
        shape = (self.num_clients, row.numel())
        if self._folder is None:
            return torch.empty(shape, dtype=row.dtype, device=self._device)
        handle, path = tempfile.mkstemp(prefix="pl_fed_", suffix=".rows", dir=self._folder)
        os.close(handle)
        size = self.num_clients * row.numel()
        mapped = torch.from_file(path, shared=True, size=size, dtype=row.dtype)
        os.unlink(path)  # the mapping lives on until the process ends, and nothing is left behind
        return mapped.view(shape)

    def _check_disk(self, needed: int) -> None:
        """Say so where the system would kill the process without a word."""
        free = shutil.disk_usage(str(self._folder)).free
        if needed > free:
            raise OSError(
                f"Expected the disk of the clients' states ({self._folder}) to have"
                f" {needed / 2**20:.1f} MiB free but got {free / 2**20:.1f}: set `store` to a"
                " folder on a larger one."
            )


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


def _temporary_folder() -> Path:
    """Return a folder for large files: ``/tmp`` itself is in memory on many systems."""
    chosen = os.environ.get("TMPDIR", "/var/tmp")
    return Path(chosen if os.access(chosen, os.W_OK) else tempfile.gettempdir())
