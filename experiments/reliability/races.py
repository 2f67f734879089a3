"""Races: two commands use one folder of runs at the same time.

Each command succeeds or ends with one sentence, and each run equals a run left alone.
"""

import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from experiments.reliability.commands import Command
from experiments.reliability.kills import (
    find_reference,
    list_arguments,
    list_differences,
    list_runs,
)
from experiments.reliability.states import FIT, STATES

RACED_STATES = (
    *("Ditto, states on disk", "FLAME", "SCAFFOLD, start", "privacy", "FedAvg, kept Adam"),
    *("Poisson cohorts", "three best checkpoints", "moving average", "Ditto, limits"),
)
LAST = ["--ckpt_path", "last"]
READERS: dict[str, Callable[[list[str]], list[str]]] = {
    "report": lambda _: ["report", "runs", "--out", "page"],
    "list": lambda _: ["list", "runs"],
    "test": lambda fit: ["test", *fit[1:], *LAST, "--trainer.default_root_dir", "runs"],
    "export": lambda _: ["export", "--ckpt", "runs", "--client", "0", "--out", "exported"],
    "resume": lambda fit: [*fit, *LAST],
    "resume with more rounds": lambda fit: [*fit, *LAST, "--trainer.max_epochs", "14"],
    "start": lambda fit: fit,
}


def run(draw: random.Random, folder: Path) -> tuple[str, str]:
    """Return a kind of state and a race, and the fault."""
    race = draw.choice([_start_twice, _resume_twice, _resume_finished_twice, _use_live_run])
    state = draw.choice(RACED_STATES)
    description, fault = race(draw, state, folder)
    return f"{state}: {description}", fault


def _start_twice(draw: random.Random, state: str, folder: Path) -> tuple[str, str]:
    """Start two runs within moments."""
    reference, _ = find_reference(state, folder)
    commands = _run_together(draw, [FIT + STATES[state]] * 2, folder)
    if faults := _list_faults(commands, may_refuse=False):
        return "two starts", faults
    runs = list_runs(folder)
    if len(runs) != 2:
        return "two starts", f"{len(runs)} folders"
    return "two starts", ", ".join(
        name for run in runs for name in list_differences(run, reference)
    )


def _resume_twice(draw: random.Random, state: str, folder: Path) -> tuple[str, str]:
    """Kill a run, and resume it twice within moments."""
    reference, seconds = find_reference(state, folder)
    first = Command(FIT + STATES[state], folder)
    while first.is_running() and not list_runs(folder):
        time.sleep(0.01)
    time.sleep(draw.uniform(0, seconds))
    first.send(signal.SIGKILL)
    first.wait()
    commands = _run_together(draw, [[*FIT, *STATES[state], *LAST]] * 2, folder)
    if faults := _list_faults(commands):
        return "two resumes", faults
    if any(command.status for command in commands):  # one may have found no checkpoint yet
        Command(list_arguments(state, folder), folder).wait()
    return "two resumes", _compare_only_run(folder, reference)


def _resume_finished_twice(draw: random.Random, state: str, folder: Path) -> tuple[str, str]:
    """Resume a finished run twice within moments: nothing is left to do."""
    reference, _ = find_reference(state, folder)
    shutil.copytree(reference.parent, folder / "runs")
    commands = _run_together(draw, [[*FIT, *STATES[state], *LAST]] * 2, folder)
    faults = _list_faults(commands)
    return "two resumes of a finished run", faults or _compare_only_run(folder, reference)


def _use_live_run(draw: random.Random, state: str, folder: Path) -> tuple[str, str]:
    """Use the folder of a run at a random moment while it runs."""
    name, make_arguments = draw.choice(list(READERS.items()))
    description = f"{name} beside a run"
    reference, seconds = find_reference(state, folder)
    live = Command(FIT + STATES[state], folder)
    time.sleep(draw.uniform(0, 1.5 * seconds))
    other = Command(make_arguments(FIT + STATES[state]), folder)
    other.wait()
    if live.wait() != 0:
        return description, f"the run ended with {live.status}: {live.output[-300:]}"
    if fault := other.fault():
        return description, fault
    run = list_runs(folder)[0]
    if name == "resume with more rounds" and other.status == 0:  # it came after the end
        return description, ""
    return description, ", ".join(list_differences(run, reference))


def _run_together(draw: random.Random, lines: list[list[str]], folder: Path) -> list[Command]:
    """Start commands within moments, and return them when all have ended."""
    commands = []
    for arguments in lines:
        commands.append(Command(arguments, folder))
        time.sleep(draw.uniform(0, 0.5))
    for command in commands:
        command.wait()
    return commands


def _list_faults(commands: list[Command], may_refuse: bool = True) -> str:
    """Return the faults of commands; all of them fail, or any if none may refuse to run."""
    faults = [command.fault() for command in commands if command.fault()]
    failed = [command for command in commands if command.status]
    if not faults and (len(failed) == len(commands) or (failed and not may_refuse)):
        faults = [failed[0].output[-300:]]
    return ", ".join(faults)


def _compare_only_run(folder: Path, reference: Path) -> str:
    runs = list_runs(folder)
    if len(runs) != 1:
        return f"{len(runs)} folders"
    return ", ".join(list_differences(runs[0], reference))
