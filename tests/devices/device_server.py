"""A process with the pretend device and all cases, which forks for each script it is told to run.

Imports and the device take ten seconds of processor time; a fork has them. Each line of the input
is a JSON list: arguments as after ``python``, environment, and the files of the output and the
errors. The answer to each line is the exit status. Nothing may compute before a fork: the threads
of autograd do not survive it.
"""

import gc
import json
import os
import runpy
import sys
import threading
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "devices")]

import pretend_device  # noqa: E402

pretend_device.install()
sys.path[:0] = pretend_device.ROOMS

import device_cases  # noqa: E402, F401 (the forks have it)

import pl_fed.command.main  # noqa: E402, F401

gc.freeze()  # collections in forks leave out all that is here


def run(arguments):
    """Run a script, ``-c`` code or ``-m`` module as ``__main__``; return the exit status."""
    kind, *rest = arguments
    try:
        if kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "-c", "exec"), {"__name__": "__main__"})
        elif kind == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [kind, *rest]
            sys.path.insert(0, str(Path(kind).parent))
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        return int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run_fork(arguments, environment, outputs):
    """Run a script in this fork, and end it."""
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    status = run(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main():
    """Serve until the input ends."""
    for line in sys.stdin:
        arguments, environment, outputs, seconds = json.loads(line)
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            run_fork(arguments, environment, outputs)
        limit = threading.Timer(seconds, os.kill, (child, 9))
        limit.start()
        _, status = os.waitpid(child, 0)
        limit.cancel()
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
