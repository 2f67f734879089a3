"""Commands of studies in forked processes, with workers that are forks, too.

An interpreter imports PyTorch and Lightning in six seconds; a fork has them.
"""

import os
import signal
import subprocess
import sys
import time
import traceback
from types import SimpleNamespace

from forked_processes import fork_context

_MAX_FILES = 1_024


class ForkedWorker:
    """Forked worker: the part of :class:`subprocess.Popen` that a pool of workers uses."""

    def __init__(self, command, *, env, stderr, **_):
        inputs, outputs = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.dup2(stderr.fileno(), 2)
            run_worker(command, env, inputs[0], outputs[1])
        os.close(inputs[0])
        os.close(outputs[1])
        self.stdin = open(inputs[1], "wb", buffering=0)  # noqa: SIM115
        self.stdout = open(outputs[0], "rb", buffering=0)  # noqa: SIM115

    def wait(self):
        """Wait for the end of the process."""
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)


def run_worker(command, environment, source, target):
    """Run the main function of a worker in this fork, and exit."""
    from pl_fed.studies import worker

    status = 1
    try:
        os.setsid()
        os.dup2(source, 0)
        os.dup2(target, 1)
        os.closerange(3, _MAX_FILES)
        os.environ.update(environment)
        sys.argv = ["worker", *command[3:]]
        worker.import_all = lambda words: None
        worker.main()
        status = 0
    except SystemExit as stop:
        status = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def fork_workers(patch):
    """Let the workers of studies in this process be forks of it."""
    from pl_fed.studies import pool

    workers = SimpleNamespace(Popen=ForkedWorker, PIPE=subprocess.PIPE)
    patch.setattr(pool, "subprocess", workers)


def run_study(arguments, folder, environment, output):
    """Run ``python -m pl_fed study`` in this fork, and exit.

    Args:
        arguments: The command line after ``study``.
        folder: The working directory.
        environment: Further environment variables.
        output: The file for all output.
    """
    import tempfile  # noqa: F401 (the pool's)

    from pl_fed.studies import command, pool

    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ.update({"WANDB_MODE": "disabled", **environment})
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    sys.argv = ["pl_fed", "study", *arguments]
    pool.subprocess = SimpleNamespace(Popen=ForkedWorker, PIPE=subprocess.PIPE)
    status = 0
    try:
        command.main(arguments)
    except SystemExit as stop:
        status = stop.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class StudyCommand:
    """Study command: ``python -m pl_fed study`` in a fork.

    Args:
        arguments: The command line after ``study``.
        folder: The working directory.
        **environment: Further environment variables.
    """

    _count = 0

    def __init__(self, arguments, folder, **environment):
        StudyCommand._count += 1
        self._output = folder / f"output_{StudyCommand._count}.txt"
        self._output.touch()
        self._process = fork_context().Process(
            target=run_study,
            args=(list(map(str, arguments)), folder, environment, self._output),
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def output(self):
        """All that the command has printed."""
        return self._output.read_text()

    def wait(self, timeout=600):
        """Return the exit status and the output of the command."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, self.output
        return self._process.exitcode, self.output

    @property
    def is_running(self):
        """Whether the command runs."""
        return self._process.exitcode is None

    def wait_for(self, condition, timeout=300):
        """Wait until a function returns a true value, and return it."""
        until = time.monotonic() + timeout
        while not (value := condition()):
            assert time.monotonic() < until, self.output
            assert self.is_running, self.output
            time.sleep(0.02)
        return value

    def signal(self, number):
        """Send a signal to the command."""
        os.kill(self.pid, number)


def run(arguments, folder, **environment):
    """Run a command to its end, and return its exit status and its output."""
    return StudyCommand(arguments, folder, **environment).wait()
