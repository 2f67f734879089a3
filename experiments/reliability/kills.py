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

from experiments.grid import ROOT
from experiments.reliability.forks import Command

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
FIT = [
    *("fit", "--config", str(ROOT / "configs/quickstart.yaml"), "--trainer.max_epochs", "12"),
    *("--trainer.check_val_every_n_epoch", "3", "--data.num_clients", "10"),
    *("--trainer.default_root_dir", "runs", "--trainer.logger", "false"),
    *("--trainer.enable_progress_bar", "false"),
    *("--trainer.callbacks+=pl_fed.callbacks.LastCheckpoint", "--trainer.callbacks.share", "1.0"),
]
SGD = ["--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.05"]
ADAM = ["--model.optimizer", "torch.optim.Adam", "--model.optimizer.lr", "0.005"]
MLP = [
    *("--model.net", "pl_fed.models.MLP", "--model.net.in_features", "64"),
    *("--model.net.hidden", "[8]", "--model.net.num_classes", "10"),
]


def _algorithm(name: str, *options: str) -> list[str]:
    return ["--model", f"pl_fed.clients.{name}", "--model.local_epochs", "1", *SGD, *MLP, *options]


STACKED = ["--federation.engine.name", "stacked"]
ONE_BY_ONE = ["--federation.engine.name", "one_by_one"]
STATES = {
    "FedAvg, server momentum": [
        *_algorithm("FedAvg"),
        *STACKED,
        *("--federation.server_optimizer", "SGD", "--federation.server_optimizer.lr", "1.0"),
        *("--federation.server_optimizer.momentum", "0.9"),
    ],
    "Ditto, kept Adam": [
        *ONE_BY_ONE,
        *ADAM,
        *("--federation.engine.keep_optimizer_state", "true"),
    ],
    "Ditto, states on disk": [*STACKED, "--federation.storage.folder", "store"],
    "FLAME": [*_algorithm("FLAME", "--model.lam", "1", "--model.rho", "0.03"), *STACKED],
    "FedTilt": [*_algorithm("FedTilt", "--model.tau", "2", "--model.lam", "2"), *ONE_BY_ONE],
    "SCAFFOLD, attack, centered clipping": [
        *_algorithm("Scaffold"),
        *ONE_BY_ONE,
        *("--federation.aggregator", "pl_fed.aggregators.CenteredClipping"),
        *("--federation.adversary.attack", "pl_fed.attacks.Mimic"),
        *("--federation.adversary.fraction", "0.2"),
    ],
    "APFL": [*_algorithm("APFL"), *STACKED],
    "FedRep": [*_algorithm("FedRep"), *ONE_BY_ONE],
    "pFedMe": [*_algorithm("PFedMe"), *STACKED],
    "FedADMM": [*_algorithm("FedADMM"), *STACKED],
    "Poisson cohorts": [
        *_algorithm("Ditto"),
        *STACKED,
        *("--federation.sampler", "pl_fed.samplers.Poisson", "--federation.sampler.rate", "0.4"),
    ],
    "schedule": [
        *_algorithm("FedAvg"),
        *STACKED,
        *("--model.lr_scheduler", "torch.optim.lr_scheduler.StepLR"),
        *("--model.lr_scheduler.step_size", "4"),
    ],
}
TABLES = ("metrics.csv", "per_client.csv", "per_client_validation.csv", "per_class.csv")


def run(draw: random.Random, folder: Path) -> tuple[str, str]:
    """Return a kind of state with the signals, and the differences after the resume."""
    state = draw.choice(list(STATES))
    signals = [draw.choice(SIGNALS) for _ in range(draw.choice([1, 1, 2, 3]))]
    description = f"{state}: {', '.join(signal.Signals(number).name for number in signals)}"
    reference, seconds = _reference(state, folder)
    for number in signals:
        command = Command(_arguments(state, folder), folder)
        time.sleep(draw.uniform(0, seconds))
        command.send(number)
        command.wait()
        if "Traceback" in command.output:
            return description, f"traceback after a signal: {command.output[-300:]}"
    return description, resume(state, folder, reference)


def run_on_full_disk(draw: random.Random, folder: Path) -> tuple[str, str]:
    """Return a kind of state and a largest file size, and the fault of the run or its resume.

    A write beyond the limit fails as on a full disk.
    """
    state = draw.choice(list(STATES))
    reference, _ = _reference(state, folder)
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
    command = Command(_arguments(state, folder), folder)
    if command.wait() != 0:
        return f"the resume ended with {command.status}: {command.output[-300:]}"
    (own,) = _list_runs(folder)[-1:]
    return ", ".join(_differences(own, reference))


def _arguments(state: str, folder: Path) -> list[str]:
    """Return the command line that starts a run, or resumes it if it has a checkpoint."""
    has_checkpoint = any(folder.glob("runs/*/checkpoints/last.ckpt"))
    return FIT + STATES[state] + (["--ckpt_path", "last"] if has_checkpoint else [])


def _limit_files(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _reference(state: str, folder: Path) -> tuple[Path, float]:
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
    return _list_runs(place)[0], float(duration.read_text())


def _list_runs(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("runs/*") if path.is_dir())


def _differences(own: Path, reference: Path) -> Iterator[str]:
    """Yield the names of tables and tensors that differ."""
    yield from (name for name in TABLES if _read(own / name) != _read(reference / name))
    tensors, expected = (dict(_list_tensors(_load(run))) for run in (own, reference))
    if tensors.keys() != expected.keys():
        yield f"names of tensors: {sorted(tensors.keys() ^ expected.keys())[:3]}"
    for name in tensors.keys() & expected.keys():
        if not torch.equal(tensors[name].nan_to_num(), expected[name].nan_to_num()):
            yield name


def _read(path: Path) -> list[dict[str, str]] | None:
    """Return the rows of a table without times; ``None`` without the file."""
    if not path.is_file():
        return None
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def _load(run: Path) -> dict[str, Any]:
    content = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    return {part: content[part] for part in ("state_dict", "federation", "optimizer_states")}


def _list_tensors(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested containers with their names."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, dict | list | tuple):
        items: Callable[[], Any] = tree.items if isinstance(tree, dict) else lambda: enumerate(tree)
        for key, item in items():
            yield from _list_tensors(item, f"{name}/{key}")
