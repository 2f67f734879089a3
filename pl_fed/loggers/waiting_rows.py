"""Rows that are written some rounds later, none of which is lost."""

from collections import deque
from collections.abc import Callable, Mapping

from torch import Tensor


class WaitingRows:
    """The rows of rounds in which nothing is written, for one logger.

    They are turned into numbers when they are written: a GPU is not waited for before.

    Args:
        log: What writes a row, given its numbers and its step: a logger's ``log_metrics``.
        save: Called when rows were written: a logger's ``save``.

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
    ) -> None:
        self._log = log
        self._save = save
        self._rows: deque[tuple[Mapping[str, Tensor | float], int]] = deque()

    def add(self, row: Mapping[str, Tensor | float], step: int) -> None:
        """Let a row wait; a number named ``step`` takes the place of its step, as in Lightning."""
        self._rows.append((row, step))

    def write(self) -> None:
        """Write all, in their order. A row is waiting until it is written, whatever happens."""
        if not self._rows:
            return
        try:
            while self._rows:
                row, step = self._rows[0]
                numbers = {name: float(value) for name, value in row.items()}
                self._log(numbers, int(numbers.pop("step", step)))
                self._rows.popleft()
            self._save()
        except Exception:
            self._rows.clear()  # a logger that failed is not asked again on the way out
            raise
