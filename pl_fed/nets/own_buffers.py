"""The buffers of modules, which trials and failed steps change or replace."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from pl_fed.trees import are_equal


class OwnBuffers:
    """Own buffers: the buffers of modules and the places where they are registered.

    Args:
        module: The module with its submodules.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (f"{prefix}.{name}" if prefix else name, part._buffers, name, buffer, buffer.detach())
            for prefix, part in module.named_modules(remove_duplicate=True)
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]

    def name_buffers(self) -> dict[str, Tensor]:
        """Return the buffers by their dotted names."""
        return {name: buffer for name, *_, buffer, _ in self._places}

    def adopt(self) -> None:
        """Put the buffers back where others replace them, with the values of these others.

        A buffer whose ``.data`` has been set is put back, too: it lies in no row.
        """
        # the buffers of TorchScript have no `get`
        for _, registered, name, buffer, own in self._places:
            other: Any = registered[name] if name in registered else None  # noqa: SIM401
            if other is buffer and buffer.data_ptr() == own.data_ptr():
                continue
            if other is not None:
                own.copy_(other.detach())
            buffer.data = own
            registered[name] = buffer

    def put_back(self) -> list[str]:
        """Put the buffers back with their own values, and return the names of the replaced ones."""
        replaced = []
        for full_name, registered, name, buffer, own in self._places:
            other: Any = registered[name] if name in registered else None  # noqa: SIM401
            if other is not buffer or buffer.data_ptr() != own.data_ptr():
                buffer.data = own
                registered[name] = buffer
                replaced.append(full_name)
        return replaced


@contextmanager
def restore_buffers(module: nn.Module) -> Iterator[list[str]]:
    """Restore a module's buffers after a trial, and add the names of changed ones to the list.

    A trial may change a buffer in place, or replace it by another tensor.
    """
    own = OwnBuffers(module)
    buffers = own.name_buffers()
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    changed: list[str] = []
    try:
        yield changed
    finally:
        replaced = own.put_back()
        changed += [name for name, b in buffers.items() if not are_equal([before[name]], [b])]
        for name in changed:
            buffers[name].copy_(before[name])
        changed += [name for name in replaced if name not in changed]
