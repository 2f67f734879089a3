"""Lines and tables of a study in the terminal."""

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pl_fed.studies.cell_folder import State
from pl_fed.studies.execution import Event
from pl_fed.studies.inspection import CellStatus
from pl_fed.text import escape_controls

_STATES = (
    *(State.DONE, State.RECORDED, State.RUNNING, State.DIVERGED, State.FAILED),
    *(State.STOPPED, State.CHANGED, State.MISSING),
)


class Progress:
    """Progress: prints a line for each ended cell, and a status line in a terminal.

    Args:
        total: The number of cells of the study that it selects.
        done: The number of cells that have a result at the start.
    """

    def __init__(self, total: int, done: int) -> None:
        self.total = total
        self.ended = done
        self._started = time.monotonic()
        self._new = 0
        self._is_live = sys.stderr.isatty()
        self._status = ""

    def __call__(self, event: Event) -> None:
        """Print an event."""
        if event.status is None:
            self._show_status(event)
            return
        self._erase()
        self.ended += event.is_final
        self._new += event.is_final
        status = event.status
        outcome = describe_outcome(status, event)
        count = f"[{self.ended}/{self.total}]" if event.is_final else "[again]"
        print(escape_controls(f"{count} {status.cell.name}: {outcome}"), flush=True)

    def _show_status(self, event: Event) -> None:
        """Show the numbers of cells and the time that they need, in a terminal."""
        if not self._is_live:
            return
        self._erase()
        waiting = event.running + event.waiting
        text = f"{self.ended} of {self.total} cells have results, {event.running} running"
        if self._new:
            pace = (time.monotonic() - self._started) / self._new
            text += f", about {format_seconds(pace * waiting)} to go"
        self._status = text
        print(text, end="\r", file=sys.stderr, flush=True)

    def _erase(self) -> None:
        """Remove the status line."""
        if self._status:
            print(" " * len(self._status), end="\r", file=sys.stderr, flush=True)
            self._status = ""

    def close(self) -> None:
        """Remove the status line at the end."""
        self._erase()


def describe_outcome(status: CellStatus, event: Event) -> str:
    """Return the end of a run in words."""
    seconds = f" in {format_seconds(event.seconds)}" if event.seconds else ""
    text = f"{status.state}{seconds}"
    if status.state is State.FAILED:
        text += f": {status.reason}" if status.reason else ""
    return f"{text} ({event.note})" if event.note else text


def format_seconds(seconds: float) -> str:
    """Return a duration as text.

    Example:
        >>> [format_seconds(value) for value in (2.34, 75, 600, 9000)]
        ['2.3 s', '75 s', '10 minutes', '2.5 hours']
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 180:
        return f"{seconds:.0f} s"
    if seconds < 7_200:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def describe_counts(statuses: Sequence[CellStatus]) -> str:
    """Return the number of cells in each state, in words."""
    counts = Counter(status.state for status in statuses)
    return ", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state])


def describe_states(statuses: Sequence[CellStatus]) -> str:
    """Return a table of states: one row for each label of each axis, and one for all cells."""
    states = [state for state in _STATES if any(status.state is state for status in statuses)]
    rows = [("all cells", list(statuses))]
    for axis in statuses[0].cell.values if statuses else ():
        for label in dict.fromkeys(status.cell.values[axis] for status in statuses):
            members = [status for status in statuses if status.cell.values[axis] == label]
            rows.append((f"{axis}={label}", members))
    cells = [["", "cells", *states]]
    for name, members in rows:
        counts = Counter(status.state for status in members)
        cells.append([name, str(len(members)), *(str(counts[state] or "") for state in states)])
    return format_table(cells)


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text as columns: the first one to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:]))
        lines.append("  ".join([name.ljust(widths[0]), *numbers]).rstrip())
    return "\n".join(map(escape_controls, lines))


def compare_rows(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return a table of the metrics of two runs of a cell, old beside new."""
    names = dict.fromkeys(name for row in (old, new) for name in row)
    rows = [["", "old", "new", "new - old"]]
    for name in names:
        if name.startswith(("test/", "counts/", "seconds/total")):
            before, after = old.get(name), new.get(name)
            are_numbers = isinstance(before, int | float) and isinstance(after, int | float)
            change = f"{after - before:+.6g}" if are_numbers else ""  # type: ignore[operator]
            rows.append([name, _format(before), _format(after), change])
    return format_table(rows)


def _format(value: Any) -> str:
    return "" if value is None else f"{value:.6g}"
