"""Execution of a study: workers run its cells, each at most twice."""

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pl_fed.studies.cell_folder import CellRecord, State
from pl_fed.studies.inspection import CellStatus
from pl_fed.studies.jobs import CheckOutcome, Death, RunJob, RunOutcome
from pl_fed.studies.pool import Pool

_MAX_ATTEMPTS = 2
_SECONDS = 0.5  # between two looks at cells of other processes


@dataclass(frozen=True)
class Event:
    """Event: a fact that an execution reports.

    Attributes:
        status: The cell with its state; ``None`` for a tick without one.
        seconds: The time that its run took.
        note: A further fact.
        is_final: Whether the cell gets no further attempt.
        running: The number of cells that this execution runs.
        waiting: The number of cells without a result.
    """

    status: CellStatus | None
    seconds: float = 0.0
    note: str = ""
    is_final: bool = True
    running: int = 0
    waiting: int = 0


class Execution:
    """Execution: runs cells in a pool.

    Args:
        study: The name of the study.
        root: The folder of the study.
        statuses: The cells to run.
        keep_checkpoints: Whether finished cells keep their checkpoints.
        report: Receives an event for each ended attempt, and ticks.
    """

    def __init__(
        self,
        study: str,
        root: Path,
        statuses: Sequence[CellStatus],
        keep_checkpoints: bool,
        report: Callable[[Event], None],
    ) -> None:
        self.study = study
        self.root = root
        self.keep_checkpoints = keep_checkpoints
        self.report = report
        self._by_path = {status.cell.path: status for status in statuses}
        self._waiting = deque(self._by_path)
        self._elsewhere: list[str] = []  # cells that other processes run
        self._attempts: Counter[str] = Counter()
        self._restarts: set[str] = set()

    def run(self, pool: Pool) -> None:
        """Run all cells; returns when each has a result, or has failed twice."""
        while self._waiting or self._elsewhere or pool.jobs:
            for worker in pool.idle:
                if self._waiting:
                    worker.give(self._make_job(self._waiting.popleft()))
            for job, outcome in pool.wait(_SECONDS):
                if isinstance(job, RunJob) and not isinstance(outcome, CheckOutcome):
                    self._end(job, outcome)
            self._watch_others()
            waiting = len(self._waiting) + len(self._elsewhere)
            self.report(Event(None, running=len(pool.jobs), waiting=waiting))

    def _make_job(self, path: str) -> RunJob:
        cell = self._by_path[path].cell
        record = CellRecord(
            self.study,
            cell.name,
            dict(cell.values),
            cell.seed,
            cell.digest,
            best=cell.best_words,
            tested=cell.is_tested,
        )
        return RunJob(
            root=str(self.root),
            path=path,
            arguments=cell.arguments,
            record=asdict(record),
            keep_checkpoints=self.keep_checkpoints,
            restart=path in self._restarts,
        )

    def _end(self, job: RunJob, outcome: RunOutcome | Death) -> None:
        """Note the end of a job: of an attempt, or of a look at a cell of another process."""
        if isinstance(outcome, Death):
            failure = RunOutcome(State.FAILED, error=f"its process {outcome.cause}")
            self._end_attempt(job, failure, has_died=True)
        elif outcome.state == State.RUNNING:
            self._elsewhere.append(job.path)
        else:
            self._end_attempt(job, outcome)

    def _end_attempt(self, job: RunJob, outcome: RunOutcome, has_died: bool = False) -> None:
        """Report an ended attempt; a first failure waits for another attempt.

        After an error, the next one starts from round 0; after a death, the run resumes.
        """
        has_failed = outcome.state == State.FAILED
        if has_failed and not has_died:
            self._restarts.add(job.path)
        self._attempts[job.path] += 1
        is_final = not has_failed or self._attempts[job.path] >= _MAX_ATTEMPTS
        if not is_final:
            self._waiting.append(job.path)
        elif has_died:
            self._record_death(job, outcome.error)
        self._report(job.path, outcome, is_final)

    def _report(self, path: str, outcome: RunOutcome, is_final: bool) -> None:
        before = self._by_path[path]
        status = CellStatus(before.cell, before.folder, State(outcome.state), outcome.error)
        self.report(Event(status, outcome.seconds, outcome.note, is_final))

    def _record_death(self, job: RunJob, error: str) -> None:
        """Write the failure of a cell after two deaths, unless another process runs it."""
        folder = self._by_path[job.path].folder
        with contextlib.suppress(OSError), folder.lock() as is_alone:
            if is_alone:
                folder.change_record(error=error)

    def _watch_others(self) -> None:
        """Take over the cells that other processes have ended, or left."""
        for path in list(self._elsewhere):
            folder = self._by_path[path].folder
            if folder.is_locked:
                continue
            self._elsewhere.remove(path)
            state = folder.read_state()
            if state.is_result:
                self._report(path, RunOutcome(state, note="by another process"), is_final=True)
            else:
                self._waiting.append(path)
