"""Inspection of a study: the state of each cell, and the check of all configs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pl_fed.studies.cell_folder import OTHER_ROUND, CellFolder, State
from pl_fed.studies.cells import Cell
from pl_fed.studies.jobs import CheckJob, CheckOutcome
from pl_fed.studies.pool import Pool
from pl_fed.studies.readers import StudyError

RecordedRows = Mapping[frozenset[tuple[str, str]], Mapping[str, Any]]
"""Rows of a table of results by the labels of their cells, with the seed."""


@dataclass(frozen=True)
class CellStatus:
    """Cell status: a cell and its state.

    Attributes:
        cell: The cell.
        folder: Its folder.
        state: Its state; ``changed`` if its folder has a run of another config.
        reason: The differences of a changed cell, or the error of a failed one.
        row: The row of a recorded cell: its labels, its status and its numbers.
    """

    cell: Cell
    folder: CellFolder
    state: State
    reason: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)


def read_states(
    root: Path, cells: Sequence[Cell], recorded: RecordedRows | None = None
) -> list[CellStatus]:
    """Return the states of cells by their folders alone.

    A finished run of other inputs is ``changed``, though its complete config may be the same.

    Args:
        root: The folder of the study.
        cells: The cells.
        recorded: The rows of an earlier table of results. A cell with a row there and without a
            folder is ``recorded``.
    """
    statuses = [_read_state(root, cell) for cell in cells]
    return [_find_row(status, recorded) if recorded else status for status in statuses]


def _find_row(status: CellStatus, recorded: RecordedRows) -> CellStatus:
    """Return the status of a cell with its recorded row, if it has no folder."""
    row = recorded.get(frozenset(status.cell.labels.items()))
    if row is None or status.folder.path.exists() or not State(row["status"]).is_result:
        return status
    return replace(status, state=State.RECORDED, row=row)


def _read_state(root: Path, cell: Cell) -> CellStatus:
    folder = CellFolder(root, cell.path)
    state, record = folder.read_state(), folder.read_record()
    if state is State.FAILED and record is not None:
        return CellStatus(cell, folder, state, record.error)
    if state.is_result and (record is None or record.digest != cell.digest):
        return CellStatus(cell, folder, State.CHANGED, "other layers or overrides")
    return CellStatus(cell, folder, state)


def needs_check(statuses: Sequence[CellStatus]) -> bool:
    """Return whether a cell has no result of these inputs, so that its config needs a check."""
    return any(not status.state.is_result for status in statuses)


def check_configs(root: Path, statuses: Sequence[CellStatus], pool: Pool) -> list[CellStatus]:
    """Check the configs of all cells without a result, and compare them with earlier runs.

    Cells that differ in the seed alone share one check.

    Args:
        root: The folder of the study.
        statuses: The states of the cells by their folders.
        pool: The workers that parse the configs.

    Returns:
        The states; a run with the same complete config as its cell counts as its result.

    Raises:
        StudyError: If a config is invalid, with the first such cell.
    """
    conditions: dict[str, list[CellStatus]] = {}
    for status in statuses:
        if not status.state.is_result:
            conditions.setdefault(status.cell.condition, []).append(status)
    outcomes: dict[str, CheckOutcome] = {}
    for job, outcome in pool.map(_make_job(root, members) for members in conditions.values()):
        if isinstance(job, CheckJob) and isinstance(outcome, CheckOutcome):
            outcomes[job.condition] = outcome
    _refuse_invalid(conditions, outcomes)
    changes = {path: text for item in outcomes.values() for path, text in item.changes.items()}
    return [_update(status, changes) for status in statuses]


def _make_job(root: Path, members: Sequence[CellStatus]) -> CheckJob:
    """Return the job that checks the cells of one condition."""
    folders = {
        status.cell.path: status.cell.seed for status in members if _needs_comparison(status)
    }
    cell = members[0].cell
    return CheckJob(cell.condition, cell.change.words(), folders, str(root))


def _needs_comparison(status: CellStatus) -> bool:
    """Return whether to compare the config of a run with that of its cell.

    Without its config, a run of other inputs differs.
    """
    record = status.folder.read_record()
    if record is not None and record.digest == status.cell.digest:
        return False
    has_run = status.state in (State.CHANGED, State.STOPPED)
    return status.folder.config.is_file() or (record is not None and has_run)


def _refuse_invalid(
    conditions: dict[str, list[CellStatus]], outcomes: dict[str, CheckOutcome]
) -> None:
    """Refuse a study with invalid configs."""
    invalid = [condition for condition in conditions if outcomes[condition].error]
    if not invalid:
        return
    others = f" (and {len(invalid) - 1} more)" if len(invalid) > 1 else ""
    place = f"In the cells {invalid[0]}{others}: " if invalid[0] else ""
    raise StudyError(f"{place}{outcomes[invalid[0]].error}")


def _update(status: CellStatus, changes: dict[str, str]) -> CellStatus:
    """Return the state of a cell after the comparison of its config."""
    reason = changes.get(status.cell.path)
    if reason is not None:
        return CellStatus(status.cell, status.folder, State.CHANGED, reason)
    if status.state is not State.CHANGED:
        return status
    record = status.folder.read_record()
    if record is not None and list(record.best) != status.cell.best_words:
        return CellStatus(status.cell, status.folder, State.CHANGED, OTHER_ROUND)
    status.folder.change_record(digest=status.cell.digest)
    return CellStatus(status.cell, status.folder, status.folder.read_state())
