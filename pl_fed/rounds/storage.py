"""The section ``federation.storage``: the storage of the clients' states between rounds."""

from dataclasses import dataclass

from pl_fed.arguments import check_writable

_PATH = "federation.storage"


@dataclass(frozen=True)
class StorageOptions:
    """Storage: the memory or folder of the clients' states between rounds.

    Args:
        folder: Folder for the clients' states, on disk. ``None`` keeps them in memory, and puts
            only the part beyond ``memory`` on disk, into the folder for temporary files.
        memory: Memory for the clients' states: a share of the free memory, in (0, 1], which the
            processes of a node divide among them; or a number of bytes (int) for each process.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If the folder cannot be written, or ``memory`` is out of range.

    Example:
        >>> StorageOptions(memory=0.25)
        StorageOptions(folder=None, memory=0.25)
    """

    folder: str | None = None
    memory: int | float = 0.5

    def __post_init__(self) -> None:
        if self.folder is not None:
            check_writable(**{f"{_PATH}.folder": self.folder})
        expected = (
            f"Expected argument `{_PATH}.memory` to be a share in (0, 1] or a number of bytes"
            f" (int) but got {self.memory!r}"
        )
        if isinstance(self.memory, bool) or not isinstance(self.memory, int | float):
            raise TypeError(f"{expected}: set a number, for example 0.5.")
        if self.memory < 0 or (isinstance(self.memory, float) and not 0 < self.memory <= 1):
            raise ValueError(f"{expected}: set, for example, 0.5.")
