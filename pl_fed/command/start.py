"""Commands that start within a second: they import neither PyTorch nor Lightning."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pl_fed.command.help_pages import WITH_A_PAGE, help_page
from pl_fed.command.hints import format_error
from pl_fed.command.listing import KINDS, print_list
from pl_fed.command.messages import SUBCOMMANDS
from pl_fed.version import __version__

_HELP = ("-h", "--help")


def run_light_command(arguments: Sequence[str]) -> bool:
    """Run a command line that needs no PyTorch; return whether it was one.

    These are ``--version``, ``list``, ``report``, the help pages, and errors in the name of the
    command.

    Args:
        arguments: The command line without the program's name.

    Raises:
        SystemExit: If the command line is wrong, with status 2.
    """
    words = list(arguments)
    command = words[0] if words else None
    if page := _find_help(words):
        print(page, end="")
        raise SystemExit(0)
    if command in ("--version", "version"):
        print(f"pl_fed {__version__}")
    elif command == "list":
        _print_list(words)
    elif command == "report":
        _write_report(words)
    elif command is None or not (command.startswith("-") or command in SUBCOMMANDS):
        got = "none" if command is None else repr(command)
        _exit(f"Expected a subcommand, one of {', '.join(SUBCOMMANDS)}, but got {got}.", words)
    else:
        return False
    return True


@contextmanager
def announce(text: str) -> Iterator[None]:
    """Show a line in the terminal while the body runs; the body prints nothing."""
    if not sys.stderr.isatty():
        yield
        return
    print(text, end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(" " * len(text), end="\r", file=sys.stderr, flush=True)


def _find_help(words: list[str]) -> str:
    """Return the help page that a command line asks for; empty if it asks for none."""
    positions = [place for place, word in enumerate(words) if word in _HELP]
    if not positions or words[positions[0] + 1 : positions[0] + 2] == ["all"]:
        return ""
    if words[0] in _HELP:
        return help_page(None)
    return help_page(words[0], KINDS) if words[0] in WITH_A_PAGE else ""


def _write_report(words: list[str]) -> None:
    from pl_fed.command.report import main

    try:
        main(words[1:])
    except KeyboardInterrupt:
        print("Stopped by Ctrl-C.", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None


def _print_list(words: list[str]) -> None:
    try:
        print_list(words[1:])
    except ValueError as error:
        _exit(str(error), words)


def _exit(message: str, words: list[str]) -> None:
    print(format_error(message, words), end="", file=sys.stderr)
    raise SystemExit(2)
