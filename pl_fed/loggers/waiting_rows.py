"""Rows of rounds that are written later, without losing any."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import cast

import torch
from torch import Tensor

_MOST_ON_DEVICE = 64  # rows that may hold tensors


class WaitingRows:
    """Waiting rows: a queue of rows between two writes of one logger.

    Tensors become numbers when a row is written, or when many rows wait, so that rounds do not wait
    for a GPU. A number takes 512 bytes on a GPU, and the rows of 1,000 rounds a megabyte.

    Args:
        log: Writes a row with its numbers and its step, as a logger's ``log_metrics``.
        save: Called after rows were written, as a logger's ``save``.
        drops_undefined: Whether to leave out undefined numbers, NaN.

    Example:
        >>> rows = WaitingRows(print)
        >>> rows.add({"train/loss": 0.5}, step=0)
        >>> rows.add({"train/loss": 0.25}, step=1)
        >>> rows.write()
        {'train/loss': 0.5} 0
        {'train/loss': 0.25} 1
    """

    def __init__(
        self,
        log: Callable[[dict[str, float], int], object],
        save: Callable[[], object] = lambda: None,
        drops_undefined: bool = False,
    ) -> None:
        self._log = log
        self._drops_undefined = drops_undefined
        self._save = save
        self._rows: deque[tuple[Mapping[str, Tensor | float], int]] = deque()
        self._num_on_device = 0  # rows that may hold tensors, the last ones

    def add(self, row: Mapping[str, Tensor | float], step: int) -> None:
        """Add a row to the queue; as in Lightning, a number named ``step`` replaces its step."""
        self._rows.append((row, step))
        self._num_on_device += 1
        if self._num_on_device == _MOST_ON_DEVICE:
            self._read_numbers()

    def _read_numbers(self) -> None:
        """Replace the tensors of the last rows by numbers, in one copy by device and dtype."""
        first = len(self._rows) - self._num_on_device
        rows = [dict(row) for row, _ in islice(self._rows, first, None)]
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, str]]] = {}
        for position, row in enumerate(rows):
            for name, value in row.items():
                if isinstance(value, Tensor):
                    groups.setdefault((value.device, value.dtype), []).append((position, name))
        for places in groups.values():
            tensors = [cast(Tensor, rows[position][name]).reshape(()) for position, name in places]
            for (position, name), number in zip(places, torch.stack(tensors).tolist()):
                rows[position][name] = float(number)
        for offset, row in enumerate(rows):
            self._rows[first + offset] = (row, self._rows[first + offset][1])
        self._num_on_device = 0

    def write(self) -> None:
        """Write all rows in order; each leaves the queue once it is written.

        If the logger fails, the queue is emptied.
        """
        if not self._rows:
            return
        try:
            while self._rows:
                row, step = self._rows[0]
                numbers = {name: float(value) for name, value in row.items()}
                if self._drops_undefined:
                    numbers = {n: value for n, value in numbers.items() if not math.isnan(value)}
                self._log(numbers, int(numbers.pop("step", step)))
                self._rows.popleft()
            self._num_on_device = 0
            self._save()
        except Exception:
            self._num_on_device = 0
            self._rows.clear()  # a failed logger is not called again while the run shuts down
            raise
