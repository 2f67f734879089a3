"""Rows of rounds that are written later, without losing any."""

from collections import deque
from collections.abc import Callable, Mapping

from torch import Tensor


class WaitingRows:
    """Waiting rows: a queue of rows between two writes of one logger.

    Tensors become numbers only when a row is written, so that rounds do not wait for a GPU.

    Args:
        log: Writes a row with its numbers and its step, as a logger's ``log_metrics``.
        save: Called after rows were written, as a logger's ``save``.

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
        """Add a row to the queue; as in Lightning, a number named ``step`` replaces its step."""
        self._rows.append((row, step))

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
                self._log(numbers, int(numbers.pop("step", step)))
                self._rows.popleft()
            self._save()
        except Exception:
            self._rows.clear()  # a failed logger is not called again while the run shuts down
            raise
