"""``python -m pl_fed study FILE``: run a study, or look at it."""

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime
from typing import Any, NoReturn

from pl_fed.command.hints import format_error
from pl_fed.command.messages import describe_file_error, explain_full_disk
from pl_fed.command.program import program_name
from pl_fed.studies.cell_folder import LOG, State, find_sibling
from pl_fed.studies.cells import find_cell
from pl_fed.studies.display import (
    Progress,
    compare_rows,
    describe_counts,
    describe_states,
    format_seconds,
)
from pl_fed.studies.execution import Event, Execution
from pl_fed.studies.inspection import CellStatus, check_configs, needs_check, read_states
from pl_fed.studies.results import RESULTS, make_row
from pl_fed.studies.study import Study
from pl_fed.studies.tuning import TABLE, Tuner

_TESTED = (State.DONE, State.RECORDED)


def main(
    arguments: Sequence[str],
    open_study: Callable[[str, str | None, str | None], Study] = Study.from_file,
    program: str = "",
) -> None:
    """Run the command; print one sentence, not a traceback, for errors of the user.

    Args:
        arguments: Arguments of the command line after ``study``.
        open_study: Returns the study for the first argument, a folder and an engine, like
            :meth:`Study.from_file`. Studies that are no files have another one.
        program: The words before the arguments, for messages; by default those of ``study``.

    Raises:
        SystemExit: With status 1 if a cell failed or the study is invalid, 2 for a wrong command
            line, and 130 after Ctrl-C.
    """
    options = _parse(arguments)
    try:
        study = open_study(options.study, options.folder, options.on)
        words = [*(program or f"{program_name()} study").split(), *arguments]
        with _explain_full_disk(study):
            _execute(study, options, shlex.join(words))
    except (ValueError, OSError) as error:
        text = describe_file_error(error) or str(error)
        if "Expected" not in text:
            raise
        print(format_error(text), end="", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("Stopped by Ctrl-C.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _execute(study: Study, options: argparse.Namespace, command: str) -> None:
    """Do what the options ask for."""
    if options.again is not None:
        _run_again(study, options.again)
    elif options.report:
        print(f"The report is {study.report()}.")
    elif options.status:
        _show_status(study, options.only)
    elif options.dry_run:
        _show_plan(study, options.only, options.workers)
    else:
        _run(study, options, command)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; exit with one sentence if they are wrong."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("study", nargs="*")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--workers")
    parser.add_argument("--folder")
    parser.add_argument("--again")
    parser.add_argument("--on")
    parser.add_argument("--status", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--dry_run", action="store_true")
    try:
        options, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        name = (error.argument_name or "study").lstrip("-")
        _exit(f"Expected argument `{name}` to be followed by a value but got none.")
    if unknown:
        _exit(f"Expected only options that --help lists but got {unknown[0]}.")
    if len(options.study) != 1:
        got = " and ".join(options.study) or "none"
        _exit(f"Expected argument `study` to be one YAML file but got {got}.")
    if options.report and options.only:
        _exit(
            f"Expected argument `report` without `only` but got {options.only[0]}: the report has"
            " all cells, and its page chooses among them."
        )
    options.study = options.study[0]
    if options.workers is not None:
        if not options.workers.isdecimal() or not int(options.workers):
            _exit(f"Expected argument `workers` to be an integer >= 1 but got {options.workers}.")
        options.workers = int(options.workers)
    return options


def _exit(message: str) -> NoReturn:
    print(format_error(message), end="", file=sys.stderr)
    sys.exit(2)


def _explain_full_disk(study: Study) -> AbstractContextManager[None]:
    """Return a context that names the folder of a study in the error of a full disk."""
    files = f"the files of the study in {study.folder}"
    return explain_full_disk(files, "repeat the command: runs that have ended stay")


def _run(study: Study, options: argparse.Namespace, command: str) -> None:
    """Run the missing trials and cells, and write the table of results."""
    if study.tuner is not None and study.list_labels_to_tune(options.only):
        _tune(study, study.tuner, options, command)
    before = study.read_states(options.only)
    done = sum(status.state.is_result for status in before)
    print(f"{study.spec.name}: {len(before)} cells, {done} of them with results", flush=True)
    progress = Progress(len(before), done)
    failed: list[CellStatus] = []

    def show_and_collect(event: Event) -> None:
        """Show an event, and collect the cells that get no further attempt."""
        progress(event)
        if event.status is not None and event.is_final and event.status.state is State.FAILED:
            failed.append(event.status)

    try:
        study.run(options.workers, options.only, show_and_collect)
    except KeyboardInterrupt:
        progress.close()
        after = study.read_states(options.only)
        print(
            f"Stopped by Ctrl-C: {describe_counts(after)}. Finished cells and checkpoints stay."
            f" Go on with:\n  {command}",
            file=sys.stderr,
        )
        sys.exit(128 + signal.SIGINT)
    finally:
        progress.close()
    after = study.read_states(options.only)
    print(f"{describe_counts(after)}. The results are in {study.folder / RESULTS}.")
    if failed:
        first, log = failed[0], failed[0].folder.path / LOG
        output = f"; its output is in {log}" if log.is_file() else ""
        print(
            format_error(
                f"Expected all cells to end but got {len(failed)} that failed twice, first"
                f" {first.cell.name} ({first.reason}){output}. The same command tries them again."
            ),
            end="",
            file=sys.stderr,
        )
        sys.exit(1)


def _tune(study: Study, tuner: Tuner, options: argparse.Namespace, command: str) -> None:
    """Run the missing trials, and print the chosen values."""
    labels = study.list_labels_to_tune(options.only)
    runs = tuner.count_runs(labels)
    print(f"{study.spec.name}: tuning by {tuner.plan.metric}, {runs} runs in all", flush=True)
    progress = Progress(runs, runs - tuner.count_missing_runs(labels))
    try:
        study.tune(options.workers, options.only, progress)
    except KeyboardInterrupt:
        print(
            "Stopped by Ctrl-C while tuning. Finished trials and checkpoints stay. Go on with:\n"
            f"  {command}",
            file=sys.stderr,
        )
        sys.exit(128 + signal.SIGINT)
    finally:
        progress.close()
    for label, values in tuner.chosen().items():
        text = ", ".join(f"{path} = {value}" for path, value in values.items())
        print(f"{tuner.plan.per}={label}: {text or 'nothing is tuned'}")
    for sentence in tuner.warnings():
        print(f"warning: {sentence}", file=sys.stderr)
    print(f"All trials are in {study.folder / TABLE}.")


def _mean_seconds(statuses: Sequence[CellStatus]) -> float | None:
    """Return the mean time of finished runs; ``None`` without any."""
    rows = [make_row(status) for status in statuses if status.state in _TESTED]
    seconds = [row["seconds/total"] for row in rows if "seconds/total" in row]
    return sum(seconds) / len(seconds) if seconds else None


def _show_plan(study: Study, only: Sequence[str], workers: int | None) -> None:
    """Print the cells, their number, and the time that they need."""
    statuses = study.read_states(only)
    if needs_check(statuses):
        with study.open_pool(workers, len(statuses)) as pool:
            statuses = check_configs(study.folder, statuses, pool)
    for status in statuses:
        print(f"{status.cell.name}: {status.state}")
    todo = [status for status in statuses if not status.state.is_result]
    seconds = _mean_seconds(statuses)
    count = study.count_workers(workers)
    if not todo:
        estimate = "nothing is left to run"
    elif seconds is None:
        estimate = "the time is unknown until a cell is done"
    else:
        time = format_seconds(seconds * len(todo) / min(count, len(todo)))
        estimate = f"about {time} on {min(count, len(todo))} workers"
    print(f"{len(statuses)} cells, {len(todo)} of them to run: {estimate}.")
    if study.tuner is not None:
        trials = study.tuner.count_missing_runs(study.list_labels_to_tune(only))
        if trials:
            print(f"The tuning comes first, with {trials} further runs.")


def _show_status(study: Study, only: Sequence[str]) -> None:
    """Print a table of states by axis, and the cells that need attention."""
    statuses = study.inspect(only)
    print(describe_states(statuses))
    for status in statuses:
        if status.reason:
            print(f"{status.cell.name}: {status.state} ({status.reason})")


def _run_again(study: Study, name: str) -> None:
    """Run a cell anew in a folder of its own, and print its old results beside the new ones."""
    cell = find_cell(name, study.cells)
    (old,) = (status for status in study.read_states() if status.cell is cell)
    if not (old.folder.read_result() or old.row):
        print(f"{cell.name} has no earlier result: the column old is empty.", file=sys.stderr)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    root = find_sibling(study.folder, "again") / stamp
    statuses = read_states(root, [cell])
    outcomes: list[Event] = []
    with study.open_pool(1) as pool:
        check_configs(root, statuses, pool)
        Execution(study.spec.name, root, statuses, False, outcomes.append).run(pool)
    new = read_states(root, [cell])[0]
    if not new.state.is_result:
        ends = [event.status for event in outcomes if event.status is not None]
        reason = new.reason or ends[-1].reason  # without a record if the folder cannot be written
        message = f"Expected {cell.name} to end but got {ends[-1].state}: {reason}."
        print(format_error(message), end="", file=sys.stderr)
        sys.exit(1)
    print(compare_rows(_numbers(old), _numbers(new)))
    print(f"The new run is in {new.folder.path}.")


def _numbers(status: CellStatus) -> Mapping[str, Any]:
    """Return the row of a cell with its numbers, under any config."""
    if status.state is State.RECORDED:
        return make_row(status)
    state = status.folder.read_result()
    return {} if state is None else make_row(replace(status, state=state))
