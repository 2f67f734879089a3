"""Kills and signals: a run that is stopped at random moments resumes bit for bit.

Each case stops a run of one kind of state by one to three signals, and resumes it. Its metrics, its
tables of clients and all tensors of its last checkpoint must be those of a run left alone.
"""

import csv
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.reliability.commands import Command
from experiments.reliability.states import FIT, STATES

FAULTS: tuple[str, ...] = (
    "SIGKILL",
    "SIGKILL",
    "SIGKILL",
    "SIGTERM",
    "SIGINT",
    "twice SIGINT",
    "SIGSTOP",
)
TABLES = ("metrics.csv", "per_client.csv", "per_client_validation.csv", "per_class.csv")
PARTS = ("state_dict", "federation", "optimizer_states", "lr_schedulers", "callbacks", "loops")
VOLATILE = ("path", "time", "speeds", "best_k_models", "current_score", "last_checkpoint_saved")


def run(draw: random.Random, folder: Path) -> tuple[str, str]:
    """Return a kind of state with the signals, and the differences after the resume."""
    state = draw.choice(list(STATES))
    faults = [draw.choice(FAULTS) for _ in range(draw.choice([1, 1, 2, 3]))]
    description = f"{state}: {', '.join(faults)}"
    reference, seconds = find_reference(state, folder)
    for fault in faults:
        command = Command(list_arguments(state, folder), folder)
        time.sleep(draw.uniform(0, seconds))
        _send(command, fault, draw)
        command.wait()
        if "Traceback" in command.output:
            return description, f"traceback after a signal: {command.output[-300:]}"
    return description, resume(state, folder, reference)


def _send(command: Command, fault: str, draw: random.Random) -> None:
    """Send the signals of a fault; a stopped process goes on a moment later."""
    command.send(signal.Signals[fault.split()[-1]])
    if fault == "twice SIGINT":
        time.sleep(draw.uniform(0, 0.2))
        command.send(signal.SIGINT)
    if fault == "SIGSTOP":
        time.sleep(0.5)
        command.send(signal.SIGCONT)


def run_on_full_disk(draw: random.Random, folder: Path) -> tuple[str, str]:
    """Return a kind of state and a largest file size, and the fault of the run or its resume.

    A write beyond the limit fails as on a full disk.
    """
    state = draw.choice(list(STATES))
    reference, _ = find_reference(state, folder)
    size = next(reference.glob("checkpoints/last.ckpt")).stat().st_size
    limit = draw.randrange(1000, size + 1000)
    description = f"{state}: files up to {limit} bytes"
    command = Command(FIT + STATES[state], folder, lambda: _limit_files(limit))
    command.wait()
    if command.status and (fault := command.fault()):
        return description, fault
    if remainder := [path.name for path in folder.rglob("*.tmp")]:
        return description, f"files are left: {remainder}"
    return description, resume(state, folder, reference)


def resume(state: str, folder: Path, reference: Path) -> str:
    """Resume a stopped run, and return its differences from the run left alone."""
    command = Command(list_arguments(state, folder), folder)
    if command.wait() != 0:
        return f"the resume ended with {command.status}: {command.output[-300:]}"
    (own,) = list_runs(folder)[-1:]
    return ", ".join(list_differences(own, reference))


def list_arguments(state: str, folder: Path) -> list[str]:
    """Return the command line that starts a run, or resumes it if it has a checkpoint."""
    has_checkpoint = any(folder.glob("runs/*/checkpoints/last.ckpt"))
    return FIT + STATES[state] + (["--ckpt_path", "last"] if has_checkpoint else [])


def _limit_files(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def find_reference(state: str, folder: Path) -> tuple[Path, float]:
    """Return the folder of a run left alone, and its duration; it is run once per campaign."""
    place = folder.parent / "references" / "".join(filter(str.isalnum, state))
    duration = place / "seconds"
    if not duration.is_file():
        shutil.rmtree(place, ignore_errors=True)
        begin = time.monotonic()
        command = Command(FIT + STATES[state], place)
        if command.wait() != 0:
            raise RuntimeError(f"The reference ended with {command.status}: {command.output}")
        duration.write_text(str(time.monotonic() - begin))
    return list_runs(place)[0], float(duration.read_text())


def list_runs(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("runs/*") if path.is_dir())


def list_differences(own: Path, reference: Path) -> Iterator[str]:
    """Yield the names of tables, files and values that differ."""
    yield from (name for name in TABLES if read_table(own / name) != read_table(reference / name))
    names, expected_names = (
        sorted(path.name for path in _checkpoints(run)) for run in (own, reference)
    )
    if names != expected_names:
        yield f"checkpoints {names} instead of {expected_names}"
        return
    for name in names:
        yield from _find_differing_values(
            own / "checkpoints" / name, reference / "checkpoints" / name
        )


def _find_differing_values(own: Path, reference: Path) -> Iterator[str]:
    """Yield the names of values of two checkpoints that differ."""
    values, expected = (dict(_list_values(_load(path))) for path in (own, reference))
    if values.keys() != expected.keys():
        yield f"{own.name}: names {sorted(values.keys() ^ expected.keys())[:3]}"
    for name in values.keys() & expected.keys():
        if not torch.equal(values[name].nan_to_num(), expected[name].nan_to_num()):
            yield f"{own.name}: {name}"


def _checkpoints(run: Path) -> list[Path]:
    return list(run.glob("checkpoints/*.ckpt"))


def read_table(path: Path) -> list[dict[str, str]] | None:
    """Return the rows of a table without times; ``None`` without the file."""
    if not path.is_file():
        return None
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def _load(path: Path) -> dict[str, Any]:
    content = torch.load(path, weights_only=True)
    return {part: content[part] for part in PARTS if part in content}


def _list_values(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and numbers of nested containers with their names."""
    if isinstance(tree, Tensor | int | float):
        yield name, torch.as_tensor(tree)
    elif isinstance(tree, dict | list | tuple):
        items: Callable[[], Any] = tree.items if isinstance(tree, dict) else lambda: enumerate(tree)
        for key, value in items():
            if not any(word in str(key) for word in VOLATILE):
                yield from _list_values(value, f"{name}/{key}")
