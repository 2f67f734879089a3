"""Race: rounds of pl_fed, of loops by hand in torch and JAX, and of pfl-research, in turns.

:func:`race` starts fresh processes for each case, as for a user's run, with one thread each. These
processes run this file, too.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from by_hand import ByHand
from cases import Case
from fit import fit
from settings import Settings, build_python_path
from torch import distributed

from pl_fed.data.client_data import ClientData

ROOT = Path(__file__).resolve().parents[2]
WARM = 2  # turns that are left out


def race(
    case: Case, settings: Settings, against: Sequence[str] = (), processes: int = 1
) -> dict[str, Any]:
    """Return the seconds of the rounds, turn by turn, for ``pl_fed`` and each of ``against``.

    Args:
        case: The federation to run.
        settings: Settings of the timing.
        against: Competitors out of ``hand``, ``pfl``, ``jax`` and ``jax-tuned``.
        processes: Number of processes that share a round.

    Returns:
        Seconds by name, ``engine`` (pl_fed's) and ``note``. If a competitor cannot take part, its
        name is missing and ``note`` gives the reason.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "times.json"
        worker = [__file__, case.as_text(), json.dumps(asdict(settings)), ",".join(against)]
        launcher = [sys.executable]
        if processes > 1:
            launcher += ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
            launcher += ["--standalone"]
        done = subprocess.run(
            [*launcher, *worker, str(result)],
            env=environment(ROOT, settings.device),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if not result.exists():
            raise RuntimeError(f"The processes of {case.title!r} failed:\n{done.stderr[-4000:]}")
        return json.loads(result.read_text())


def environment(tree: Path, device: str) -> dict[str, str]:
    """Return the environment of a process that runs a source tree's pl_fed on one thread."""
    path = build_python_path(tree)  # pfl may lie in a carried folder
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PFL_PYTORCH_DEVICE": device}
    return {**os.environ, **own}


class Turns:
    """Turns: records times, and lets each competitor run as many rounds as pl_fed has just run.

    Short rounds run in blocks of about 0.1 s, so that a round finds the caches as its predecessor
    left them, as in a run of its own.
    """

    def __init__(self, settings: Settings, others: dict[str, Callable[[], None]]) -> None:
        self.settings, self.others = settings, others
        self.times: dict[str, list[float]] = {name: [] for name in others}
        self.warmup = settings.warmup
        self.until = 0.0
        self.block = self.left = 1  # rounds in a row; and those that are left to pl_fed

    def continue_after_round(self, seconds: float | None) -> bool:
        """Record the finished round, and return whether to continue."""
        if self.warmup > 0:
            self.warmup -= 1
            return True
        if not self.until:
            self.until = time.perf_counter() + self.settings.seconds
            if seconds and not distributed.is_initialized():
                self.block = max(1, min(20, int(0.1 / seconds)))
            self.left = 0
        else:
            self.times.setdefault("pl_fed", []).append(seconds)
            self.left -= 1
        if self.left > 0:
            return True
        self.left = self.block
        return self.turn("pl_fed")

    def turn(self, reference: str) -> bool:
        """Let each competitor run a round, unless there are enough."""
        enough = len(self.times.get(reference, [])) >= self.settings.turns + WARM
        if share_decision(enough and time.perf_counter() > self.until, self.settings.device):
            return False
        for name, run in self.others.items():
            self.times[name] += [time_run(run, self.settings) for _ in range(self.block)]
        share_decision(True, self.settings.device)  # all processes begin the next round together
        return True

    def alone(self) -> None:
        """Run the competitors without pl_fed."""
        self.until = time.perf_counter() + self.settings.seconds
        while self.others and self.turn(next(iter(self.others))):
            pass

    def result(self) -> dict[str, list[float]]:
        """Return the times of the complete turns, without warm-up."""
        complete = min(map(len, self.times.values()), default=0)
        return {name: times[WARM:complete] for name, times in self.times.items()}


def time_run(run: Callable[[], None], settings: Settings) -> float:
    started = settings.now()
    run()
    return settings.now() - started


def share_decision(decision: bool, device: str) -> bool:
    """Wait for all processes, and return the first process's decision."""
    if not distributed.is_initialized():
        return decision
    shared = torch.tensor(float(decision), device=device)
    distributed.broadcast(shared, 0)
    distributed.barrier()
    return bool(shared)


def rivals(case: Case, data: ClientData, names: list[str], notes: list[str]) -> dict:
    """Build the competitors of pl_fed."""
    found = {}
    if "pfl" in names:  # first: importing it joins the group of processes
        try:
            from by_pfl import ByPfl
        except ImportError as error:
            notes.append(f"pfl-research cannot be imported ({error}): pip install pfl==0.6.0")
        else:
            found["pfl"] = ByPfl(case, data).round
    if "jax" in names or "jax-tuned" in names:
        from by_jax import ByJax

        for name in {"jax", "jax-tuned"}.intersection(names):
            found[name] = ByJax(case, data, tuned=name == "jax-tuned").round
    if "hand" in names:
        join()
        found["hand"] = ByHand(case, data).round
    return dict(sorted(found.items()))


def join() -> None:
    """Join the process group that torchrun started."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not distributed.is_initialized():
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def work(case: Case, settings: Settings, names: list[str]) -> dict:
    """Run a case, or this process's share of it."""
    torch.set_num_threads(1)
    processes, notes = int(os.environ.get("WORLD_SIZE", 1)), []
    if settings.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    data = case.data()
    clients = data.clients.to(torch.device(settings.device), torch.float32)
    turns = Turns(settings, rivals(case, clients, names, notes))
    engine = ""
    try:
        engine = fit(case, data, settings, processes, turns.continue_after_round)
    except ValueError as error:
        if "processes" not in str(error):
            raise
        notes.append(f"pl_fed: {error}")
        turns.alone()
    return {**turns.result(), "engine": engine, "note": " ".join(notes)}


def main() -> None:
    case, settings, names, result = sys.argv[1:]
    found = work(Case.from_text(case), Settings(**json.loads(settings)), names.split(","))
    if int(os.environ.get("RANK", 0)) == 0:
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
