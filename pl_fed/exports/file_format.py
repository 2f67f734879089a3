"""The contract of a file format of nets."""

import io
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import IO

from torch import nn

from pl_fed.trees import Tree


class Format(ABC):
    """File format of an export. All nets that an instance writes differ only in their numbers.

    Args:
        example: Inputs of a few samples, [samples, ...].
    """

    suffix: str
    """The suffix of the files."""

    package: str | None = None
    """The package that the format needs beside torch."""

    extra: str | None = None
    """The extra of pl_fed that installs the package; ``None`` if it has the format's name."""

    takes_trees: bool = False
    """Whether the net may take a tuple or a dict of tensors."""

    def __init__(self, example: Tree) -> None:
        self.example = example

    @abstractmethod
    def write(self, net: nn.Module, path: Path) -> None:
        """Write a net that is in evaluation mode.

        Raises:
            ValueError: If the net cannot be written in this format.
        """


def write_at_once(save: Callable[[IO[bytes]], object], path: Path) -> None:
    """Write the file that a function of torch makes in memory, all of it at once.

    On a full disk, torch hides the error of the system, or ends the process.

    Args:
        save: Saves into an open file, here one in memory.
        path: The file.

    Raises:
        OSError: If the file cannot be written, for example on a full disk.
    """
    content = io.BytesIO()
    save(content)
    path.write_bytes(content.getbuffer())
