"""The lines of a running fit in a terminal: rounds, results, clients."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from torch import Tensor

_SLOW_SECONDS = 2.0  # a round, or an evaluation, gets a line of its own after this time


@dataclass
class Work:
    """Work: a part of a run with a known number of clients or batches.

    Attributes:
        name: The work, such as ``Clients`` or ``Validating``.
        total: The number of clients or batches; may be infinite.
        done: The number of finished ones.
        started: The time of the start, in seconds.
    """

    name: str
    total: float = math.inf
    done: int = 0
    started: float = field(default_factory=lambda: time.monotonic())


@dataclass
class RoundDisplay:
    """Round display: a bar of rounds with times and results, and a bar for slow work.

    Attributes:
        total: The number of rounds of the run; may be infinite.
        finished: The number of finished rounds, those before a resume included.
        results: The results of the last validation as text.
        work: The work of the present round; ``None`` between rounds.
        loss: The last training loss, a number or a tensor with one; ``None`` before the first.
        activity: Returns the preparation that runs now; empty if there is none.
    """

    total: float
    finished: int = 0
    results: str = ""
    work: Work | None = None
    loss: Tensor | float | None = None
    activity: Callable[[], str] = lambda: ""
    _started: float = field(default_factory=lambda: time.monotonic())
    _ends: list[tuple[int, float]] = field(default_factory=list)  # the first and the last round

    def finish_round(self, finished: int) -> None:
        """Count a finished round."""
        self.finished = finished
        self._ends = [*self._ends[:1], (finished, time.monotonic())]

    def seconds(self) -> float:
        """Return the seconds since the start of the run."""
        return time.monotonic() - self._started

    def seconds_left(self) -> float | None:
        """Return the estimated seconds to the end; ``None`` without an estimate.

        The pace is that of all rounds but the first, with its preparations.
        """
        if len(self._ends) < 2 or not math.isfinite(self.total):
            return None
        (first, first_end), (last, last_end) = self._ends
        pace = (last_end - first_end) / (last - first)
        return max(0.0, pace * (self.total - last) - (time.monotonic() - last_end))

    def summarize(self) -> str:
        """Return the number of finished rounds, the time and the loss as text."""
        return f"{self._title(self.finished)}  {self._times()}"

    def _title(self, number: float) -> str:
        return f"Round {number:.0f}" + (f"/{self.total:.0f}" if math.isfinite(self.total) else "")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines."""
        title = self._title(min(self.finished + 1, self.total))
        yield _bar(title, self.finished, self.total, self._times())
        activity = self.activity()
        for line in filter(None, (self.results, activity)):
            yield Text(line, no_wrap=True, overflow="ellipsis")
        if not activity:
            yield from slow_work(self.work)

    def _times(self) -> str:
        remaining = self.seconds_left()
        texts = [format_seconds(self.seconds())]
        if self.finished < self.total and remaining is not None:
            texts.append(f"{format_seconds(remaining)} left")
        loss = "" if self.loss is None else f"  loss {float(self.loss):.4g}"
        return f"{', '.join(texts)}{loss}"


def slow_work(work: Work | None, seconds: float = _SLOW_SECONDS) -> Iterator[RenderableType]:
    """Yield a bar for work that has taken longer than some seconds already."""
    if work is not None and time.monotonic() - work.started > seconds:
        total = f"/{work.total:.0f}" if math.isfinite(work.total) else ""
        text = format_seconds(time.monotonic() - work.started)
        yield _bar(f"{work.name} {work.done}{total}", work.done, work.total, text)


def _bar(title: str, done: float, total: float, text: str) -> Table:
    """Return a line with a title, a bar and a text."""
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    is_known = math.isfinite(total) and total > 0
    line.add_row(title, ProgressBar(total if is_known else None, done, pulse=not is_known), text)
    return line


def format_seconds(seconds: float) -> str:
    """Return a duration in minutes and seconds, and hours from one hour on.

    Example:
        >>> format_seconds(12.9), format_seconds(3723)
        ('0:12', '1:02:03')
    """
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
