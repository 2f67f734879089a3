"""Commands in forks: a fork has pl_fed imported, and takes nothing down with it."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from pl_fed.command.main import main

TIMED_OUT = "timed out"


class Command:
    """``python -m pl_fed`` in a fork of its own process group.

    Args:
        arguments: The command line after ``python -m pl_fed``.
        folder: The working directory.
        prepare: Called in the fork before the command, for example to limit its files.
    """

    def __init__(
        self, arguments: list[str], folder: Path, prepare: Callable[[], None] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / f"output-{time.monotonic_ns()}"
        self.status: int | str | None = None
        self.pid = _fork()
        if self.pid == 0:
            self._run(arguments, folder, prepare)

    def _run(self, arguments: list[str], folder: Path, prepare: Callable[[], None] | None) -> None:
        status = 0
        try:
            with self._log.open("wb") as log, Path(os.devnull).open("rb") as nothing:
                os.dup2(nothing.fileno(), 0)
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            sys.stdout, sys.stderr = (os.fdopen(stream, "w", closefd=False) for stream in (1, 2))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.chdir(folder)
            sys.argv = ["pl_fed", *arguments]
            if prepare is not None:
                prepare()
            main(arguments)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
            status = 99
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status & 255)

    def is_running(self) -> bool:
        """Return whether the command has not ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the command has not ended."""
        if self.is_running():
            os.kill(self.pid, number)

    def wait(self, seconds: float = 120.0) -> int | str:
        """Return the exit status; end the command after some seconds."""
        end = time.monotonic() + seconds
        while self.is_running():
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self.status = TIMED_OUT
                break
            time.sleep(0.01)
        assert self.status is not None  # noqa: S101
        return self.status

    @property
    def output(self) -> str:
        """The printed text."""
        return self._log.read_text(errors="replace") if self._log.is_file() else ""

    def fault(self) -> str:
        """Return the fault of an ended command, or an empty string.

        A command succeeds, is ended by a signal of its own, or prints one line that begins with
        ``error:``. A traceback is always a fault.
        """
        if self.status == TIMED_OUT:
            return TIMED_OUT
        if "Traceback (most recent call last)" in self.output:
            return f"traceback: {_last_line(self.output)}"
        if isinstance(self.status, int) and self.status < 0:
            return f"ended by signal {-self.status}"
        errors = [line for line in self.output.splitlines() if line.startswith("error:")]
        if self.status and len(errors) != 1:
            return f"{len(errors)} errors, status {self.status}: {_last_line(self.output)}"
        return ""


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fork()


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")[:300]
