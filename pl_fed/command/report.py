"""``python -m pl_fed report RUN…``: write a page about runs; trains and loads nothing."""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from pl_fed.arguments import check_writable
from pl_fed.command.messages import describe_file_error, explain_full_disk
from pl_fed.command.program import program_name
from pl_fed.reports import page
from pl_fed.reports.run import Run, find_runs
from pl_fed.text import escape_controls


def report(arguments: Sequence[str]) -> Path:
    """Write the report and return its path.

    Args:
        arguments: Arguments of the command line after ``report``.

    Raises:
        FileNotFoundError: If a folder does not exist or holds no run.
        OSError: If the disk is full.
        ValueError: If a folder has no results, or the page cannot be written.
    """
    options = _parse(arguments)
    check_writable(out=options.out)
    runs, skipped = _read_runs(options.runs)
    unfinished = [f"{run.folder}: unfinished." for run in runs if not run.is_finished]
    unfinished += [f"{run.folder}: {run.summary['diverged']}." for run in runs if run.is_diverged]
    damaged = [f"{run.folder}: {', '.join(run.damage)}." for run in runs if run.damage]
    for note in (*skipped, *unfinished, *damaged):
        print(f"note: {escape_controls(note)}", file=sys.stderr)
    with explain_full_disk(f"the report in {options.out}", "repeat the command"):
        path = page.write(runs, Path(options.out), skipped)
    print(f"The report is {escape_controls(str(path))}; its pictures and tables are beside it.")
    return path


def _read_runs(paths: Sequence[str]) -> tuple[list[Run], list[str]]:
    """Read the runs in some folders; the garbage collector would walk over millions of cells."""
    gc.disable()
    try:
        return find_runs(paths)
    finally:
        gc.freeze()
        gc.enable()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; exit with one sentence if they are wrong."""
    parser = argparse.ArgumentParser(
        usage=f"{program_name()} report [--out FOLDER] RUN [RUN ...]",
        description="Compare runs: tables and pictures in one page that opens offline.",
        allow_abbrev=False,
    )
    runs = "folder of a run, or of several runs, for example runs/quickstart"
    parser.add_argument("runs", nargs="*", metavar="RUN", help=runs)
    out = "folder for report.html and for each picture as PNG and CSV"
    parser.add_argument("--out", nargs="?", metavar="FOLDER", default="runs/report", help=out)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        got = escape_controls(" ".join(unknown))
        parser.exit(2, f"error: Expected only options that --help lists but got {got}.\n")
    for name in ("runs", "out"):
        if not getattr(options, name):
            parser.exit(2, f"error: Expected argument `{name}` to be set but got none.\n")
    return options


def main(arguments: Sequence[str]) -> None:
    """Run the command; print one sentence, not a traceback, for errors of the user.

    Args:
        arguments: Arguments of the command line after ``report``.
    """
    try:
        report(arguments)
    except (ValueError, OSError) as error:
        text = describe_file_error(error) or str(error)
        if not text.startswith("Expected"):
            raise
        print(f"error: {escape_controls(text)}", file=sys.stderr)
        sys.exit(1)
