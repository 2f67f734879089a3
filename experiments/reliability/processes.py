"""Runs of two processes: one is killed, fails or hangs; the other ends, and the run resumes.

Lightning's launcher starts an interpreter for the other process. Here the other process is a fork,
which has pl_fed imported. One or two processes resume the run; its losses and models must be those
of one process left alone, within rounding.
"""

import contextlib
import math
import os
import pickle
import random
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.utilities import rank_zero_only

from experiments.reliability.forks import Command
from experiments.reliability.kills import find_reference, list_arguments, list_runs, read_table
from experiments.reliability.states import FAULTY

STATES = (
    *("Ditto, states on disk", "FLAME, on disk", "FedRep", "FedAvg, kept Adam", "Poisson cohorts"),
    *("FedAvg, server Adam, cosine", "SCAFFOLD, attack, centered clipping", "privacy"),
    *("DP-FTRL, Ditto on disk", "three best checkpoints", "moving average"),
)
SIGNALS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGINT")
USER_FAULTS = ("raises", "raises", "exits", "hangs")  # of a user's code in a round
TWO = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
TIMEOUT = ["--trainer.strategy", "DDPStrategy", "--trainer.strategy.timeout", "00:00:20"]
SECONDS = 120.0  # for both processes to end: the time-out, and a minute after the launcher
TOLERANCE = 1e-3


class Worker:
    """Worker: the fork that runs as the second process, with the methods of a ``Popen``.

    Args:
        pid: The id of the fork.
        pipe: The fork waits for its environment in this pipe.
        env: The environment.
    """

    def __init__(self, pid: int, pipe: int, *_: Any, env: dict[str, str], **__: Any) -> None:
        self.pid = pid
        self.returncode: int | None = None
        with contextlib.suppress(BrokenPipeError), os.fdopen(pipe, "wb") as file:
            pickle.dump(env, file)

    def poll(self) -> int | None:
        """Return the exit status, or ``None`` while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


def fork_worker(fault: str = "") -> None:
    """Fork the process that Lightning's launcher will start; the fork waits for the launcher.

    Args:
        fault: The value of ``RELIABILITY_FAULT``.
    """
    if fault:
        os.environ["RELIABILITY_FAULT"] = fault
    reader, writer = os.pipe()
    worker = os.fork()
    if worker:
        os.close(reader)
        subprocess_script.subprocess = SimpleNamespace(Popen=partial(Worker, worker, writer))
        return
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        content = file.read()
    if not content:  # the launcher has ended before it started a process
        os._exit(0)
    os.environ.update(pickle.loads(content))
    rank_zero_only.rank = int(os.environ["LOCAL_RANK"])


def run(draw: random.Random, folder: Path) -> tuple[str, str]:
    """Return a kind of state and a fault of a process, and the differences after the resume."""
    rank, processes = draw.randrange(2), draw.choice([1, 2])
    has_user_fault = draw.random() < 0.4
    state = FAULTY if has_user_fault else draw.choice(STATES)
    fault = draw.choice(USER_FAULTS if has_user_fault else SIGNALS)
    description = f"{state}: {fault} in process {rank}, resumed on {processes}"
    reference, seconds = find_reference(state, folder)
    variable = f"{fault} {rank} {draw.randrange(1, 9)}" if has_user_fault else ""
    arguments = [*list_arguments(state, folder), *TWO, *TIMEOUT]
    command = Command(arguments, folder, lambda: fork_worker(variable))
    worker = _find_child(command)
    if not has_user_fault:
        time.sleep(draw.uniform(0, 1.5 * seconds))
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker if rank else command.pid, signal.Signals[fault])
    if remaining := _wait(command, worker):
        return description, f"{remaining} still running after {SECONDS:.0f} s"
    if "Traceback" in command.output and fault != "raises":
        return description, f"traceback: {command.output[-300:]}"
    return description, _resume(state, folder, processes, reference)


def _find_child(command: Command) -> int:
    """Return the process that a command forks at its start."""
    path = Path(f"/proc/{command.pid}/task/{command.pid}/children")
    while not (children := path.read_text().split()):
        time.sleep(0.01)
    return int(children[0])


def _wait(command: Command, worker: int) -> str:
    """Wait for both processes, and return the names of those that do not end."""
    end = time.monotonic() + SECONDS
    while (command.is_running() or _is_alive(worker)) and time.monotonic() < end:
        time.sleep(0.05)
    processes = {"launcher": command.pid, "worker": worker}
    alive = {name: pid for name, pid in processes.items() if _is_alive(pid)}
    for pid in alive.values():
        os.kill(pid, signal.SIGKILL)
    command.wait()
    return ", ".join(alive)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _resume(state: str, folder: Path, processes: int, reference: Path) -> str:
    """Resume a stopped run, and return its differences from the run left alone."""
    arguments = list_arguments(state, folder)
    if processes == 2:
        command = Command([*arguments, *TWO], folder, fork_worker)
    else:
        command = Command(arguments, folder)
    if command.wait() != 0:
        return f"the resume ended with {command.status}: {command.output[-300:]}"
    own = list_runs(folder)[-1]
    faults = [*_compare_losses(own, reference), *_compare_models(own, reference)]
    return ", ".join(faults)


def _compare_losses(own: Path, reference: Path) -> list[str]:
    """Return the places of losses in metrics.csv that differ by more than rounding."""
    rows, expected = (read_table(run / "metrics.csv") or [] for run in (own, reference))
    if len(rows) != len(expected):
        return [f"{len(rows)} rows instead of {len(expected)}"]
    return [
        f"{name} in round {row['round']}"
        for row, other in zip(rows, expected)
        for name, text in row.items()
        if name.endswith("/loss") and not _is_close(text, other[name])
    ]


def _is_close(text: str, expected: str) -> bool:
    if not text or not expected:
        return text == expected
    return math.isclose(float(text), float(expected), rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _compare_models(own: Path, reference: Path) -> list[str]:
    """Return the names of tensors of the models that differ by more than rounding."""
    models, expected = (
        torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for run in (own, reference)
    )
    return [
        name
        for name, tensor in expected.items()
        if not torch.allclose(models[name], tensor, TOLERANCE, TOLERANCE, equal_nan=True)
    ]
