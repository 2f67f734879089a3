"""The options of reading a map-style data set."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ReadingOptions:
    """Reading options: how samples are read and stored.

    Attributes:
        redraw: Whether training minibatches read their samples again; ``None`` if these are random.
        on_disk: Whether the inputs are stored in a temporary file instead of memory.
        num_workers: Number of processes that read; 0 for this one.
        own: Whether minibatches are those of the data set and its collate function, unchanged.
        labels: The classes of all samples for partitioners, or a function that returns that of a
            sample; ``None`` for an entry of the samples or their targets.
    """

    redraw: bool | None = None
    on_disk: bool = False
    num_workers: int = 0
    own: bool = False
    labels: Callable[[Any], Any] | Sequence[int] | Sequence[str] | None = None
