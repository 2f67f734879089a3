"""``python -m pl_fed report RUN…``: a page about runs; nothing is trained, nothing is loaded."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jsonargparse import ArgumentParser

from pl_fed.arguments import check_writable
from pl_fed.command.messages import of_a_file, sentence
from pl_fed.reports import page
from pl_fed.reports.run import find_runs
from pl_fed.text import printable


class _Parser(ArgumentParser):
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with one sentence."""
        self.exit(2, f"error: {sentence(message)}\n")


def report(arguments: Sequence[str]) -> Path:
    """Write the page that the arguments ask for, and return where it is.

    Args:
        arguments: Those of the command line, after ``report``.

    Raises:
        FileNotFoundError: If a folder is not there, or holds no run.
        ValueError: If a folder holds nothing to show, or the page cannot be written.
    """
    given = _parser().parse_args(list(arguments))
    check_writable(out=given.out)
    runs, skipped = find_runs(given.runs)
    unfinished = [f"{run.folder}: unfinished." for run in runs if not run.is_finished]
    damaged = [f"{run.folder}: {', '.join(run.damage)}." for run in runs if run.damage]
    for each in (*skipped, *unfinished, *damaged):
        print(f"note: {printable(each)}", file=sys.stderr)
    written = page.write(runs, Path(given.out), skipped)
    print(f"The report is {printable(str(written))}; its pictures and tables are beside it.")
    return written


def _parser() -> ArgumentParser:
    parser = _Parser(
        prog="python -m pl_fed report",
        description="Tables and pictures of runs, in one page that opens offline.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=str,
        metavar="RUN",
        help="folders of runs, or folders that hold several, as runs/quickstart",
    )
    parser.add_argument(
        "--out",
        type=str,
        metavar="FOLDER",
        default="runs/report",
        help="folder for report.html, and each picture as PNG and CSV",
    )
    return parser


def main() -> None:
    """Run the command; one clear sentence, not a trace, for what the user can mend."""
    try:
        report(sys.argv[2:])
    except (ValueError, OSError) as error:
        text = of_a_file(error) or str(error)
        if not text.startswith("Expected"):
            raise
        print(f"error: {printable(text)}", file=sys.stderr)
        sys.exit(1)
