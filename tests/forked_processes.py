"""Processes that start with pl_fed imported: forks of a server that has imported it once.

An interpreter imports PyTorch and Lightning in four seconds; a fork has them.
"""

import atexit
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

PRELOADED = ["parsed_once"]


def fork_context():
    """Return the context of multiprocessing whose server has imported pl_fed and ``worlds``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # Python 3.11 passes no path to the server
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


class ForkedCommand:
    """``python -m pl_fed`` in a fork, with the methods of :class:`subprocess.Popen`.

    Args:
        arguments: The command line after ``python -m pl_fed``; or ``-c`` and a program.
        folder: The working directory.
        forks_others: Whether Lightning's launcher forks the other processes of the run, too. It
            starts interpreters otherwise.
    """

    def __init__(self, arguments, folder, forks_others=True):
        self._output, output = multiprocessing.Pipe(duplex=False)
        self._started, started = multiprocessing.Pipe(duplex=False)
        started_by_fork = started if forks_others else None
        self._process = fork_context().Process(
            target=run_command,
            args=(arguments, dict(os.environ), folder, output, started_by_fork),
        )
        self._process.start()
        output.close()
        started.close()
        self.pid = self._process.pid

    @property
    def returncode(self):
        """The exit status; ``None`` while the process runs."""
        return self._process.exitcode

    def poll(self):
        """Return the exit status; ``None`` while the process runs."""
        return self._process.exitcode

    def terminate(self):
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self):
        """Send SIGKILL."""
        self._process.kill()

    def children(self):
        """Return the ids of the processes that Lightning's launcher has started."""
        if self._started.poll():
            try:
                return [self._started.recv()]
            except EOFError:  # it starts interpreters
                pass
        return children(self)

    def communicate(self, timeout):
        """Return what this process and those it started have printed, when all have ended."""
        until, output = time.monotonic() + timeout, b""
        while self._output.poll(max(0.0, until - time.monotonic())):
            printed = os.read(self._output.fileno(), 65536)
            if not printed:
                self._process.join(timeout)
                return output.decode(), None
            output += printed
        raise subprocess.TimeoutExpired("python -m pl_fed", timeout, output)


class ForkedPopen:
    """The part of :class:`subprocess.Popen` that Lightning's launcher uses, by a fork."""

    def __init__(self, arguments, environment, folder, output):
        self._process = multiprocessing.get_context("forkserver").Process(
            target=run_command, args=(arguments, environment, folder, output, None)
        )
        self._process.start()
        self.pid = self._process.pid
        self.returncode = None

    def poll(self):
        """Return the exit status; ``None`` while the process runs."""
        self.returncode = self._process.exitcode
        return self.returncode

    def send_signal(self, signum):
        """Send a signal to the process if it runs."""
        if self.poll() is None:
            os.kill(self.pid, signum)


def run_command(arguments, environment, folder, output, started):
    """Run a command line in this process as an interpreter would, and exit.

    Args:
        arguments: The command line after ``python -m pl_fed``; or ``-c`` and a program.
        environment: The environment variables.
        folder: The working directory.
        output: Connection that takes the place of standard output and standard error.
        started: Connection for the ids of the processes that Lightning's launcher forks; ``None``
            lets it start interpreters.
    """
    from lightning.pytorch.strategies.launchers import subprocess_script
    from lightning.pytorch.utilities import rank_zero_only

    from pl_fed.command.main import main

    def fork(command, env, cwd):
        process = ForkedPopen(command[3:], env, cwd or folder, output)
        started.send(process.pid)
        return process

    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ.clear()
    os.environ.update(environment)
    rank_zero_only.rank = int(environment.get("LOCAL_RANK", 0))  # as if imported here
    sys.argv = ["pl_fed", *arguments]
    sys.modules["__main__"].__spec__ = SimpleNamespace(name="pl_fed.__main__")  # for the launcher
    if started is not None:
        forkserver._forkserver.ensure_running = lambda: None  # it would start another server
        subprocess_script.subprocess = SimpleNamespace(Popen=fork)
    status = 0
    try:
        if arguments[0] == "-c":
            exec(arguments[1], {})
        else:
            main()
    except SystemExit as stopped:
        status = stopped.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def children(process):
    """Return the ids of a process's children."""
    files = Path(f"/proc/{process.pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]
