"""``OMP_NUM_THREADS=1 python experiments/benchmarks/overhead.py``: the work around the clients.

Times a round of ``Trainer.fit`` without local steps and their preparation. The rest is the draw of
the cohort, rows of 109,386 parameters for 10 clients, the loop and its hooks, checks, aggregation,
the server's step, and logging. The script prints a table of the medians. On a shared machine, the
fastest tenth is more reliable.

``--profile quiet`` prints where the time of a line goes.
"""

import argparse
import contextlib
import cProfile
import os
import pstats
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import Logger, WandbLogger
from torch import Tensor

import pl_fed
from pl_fed.clients import FedAvg
from pl_fed.clients.contract import ModelRows
from pl_fed.data import FederatedData
from pl_fed.data.source import Arrays, DataSource
from pl_fed.engine import Chunk, EngineChoice
from pl_fed.models import MLP
from pl_fed.samplers import Uniform

CLIENTS, COHORT, SAMPLES = 100, 10, 100
NEVER = 1_000_000


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    target: float
    every: int = 1
    bar: Callable[[], Callback] | None = None
    wandb: bool = False
    more: dict[str, Any] = field(default_factory=dict)


CASES = {
    "quiet": Case("nothing is due", 1.0, every=NEVER),
    "csv": Case("a row of metrics.csv", 3.0),
    "tqdm": Case("the same, offline W&B, progress bar (TQDM)", 8.0, 1, TQDMProgressBar, True),
    "rich": Case("the same, offline W&B, progress bar (Rich)", 8.0, 1, RichProgressBar, True),
    "tenth": Case(
        "the same with TQDM, rows written every 10th round", 8.0, 10, TQDMProgressBar, True
    ),
}


class Noise(DataSource):
    """Random inputs and classes, the same number for each client."""

    def load(self) -> Arrays:
        """Return the samples."""
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(CLIENTS * SAMPLES, 784, generator=draw)
        y = torch.randint(10, (CLIENTS * SAMPLES,), generator=draw)
        return Arrays(x, y, torch.arange(CLIENTS).repeat_interleave(SAMPLES), num_classes=10)


class NoSteps(EngineChoice):
    """Engine without local steps: every round returns the models of the first round."""

    trained: ModelRows | None = None

    def run(self, client: Any, optimizer: Any, chunk: Chunk) -> dict[str, Tensor]:
        """Report each client as finished, and return a loss for each."""
        if self.trained is None:
            self.trained = chunk.round.models["global"].clone()
        chunk.round.models["global"] = self.trained
        for done in range(1, 1 + len(chunk.clients)):
            chunk.on_done(done)
        return {"loss": torch.ones(len(chunk.clients))}


class Clock(Callback):
    """Callback that records the start of each round, and optionally profiles some rounds."""

    def __init__(self, profiler: cProfile.Profile | None = None) -> None:
        self.times: list[float] = []
        self.profiler = profiler

    def on_train_epoch_start(self, *_: Any) -> None:
        """Record the time."""
        self.times.append(time.perf_counter())
        if self.profiler is not None and len(self.times) == 20:
            self.profiler.enable()

    def on_train_end(self, *_: Any) -> None:
        """Stop the profiler."""
        if self.profiler is not None:
            self.profiler.disable()

    @property
    def milliseconds(self) -> list[float]:
        """Milliseconds of each round, without the first rounds."""
        return [1e3 * (b - a) for a, b in zip(self.times[20:], self.times[21:])]


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Discard printed text; it is still encoded, as for a terminal."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def run(case: Case, rounds: int, profiler: cProfile.Profile | None = None) -> list[float]:
    """Fit, and return the milliseconds of each round."""
    clock = Clock(profiler)
    callbacks = [clock] if case.bar is None else [clock, case.bar()]
    with tempfile.TemporaryDirectory() as folder, silence():
        loggers: list[Logger] = []
        if case.wandb:
            loggers.append(WandbLogger(save_dir=folder, project="overhead", offline=True))
        federation = pl_fed.Federation(Uniform(COHORT), seed=0)
        federation.engine_choice = NoSteps(pl_fed.EngineOptions("one_by_one"))
        trainer = pl_fed.Trainer(
            federation,
            run_dir=folder,
            logger=loggers,
            callbacks=callbacks,
            max_epochs=rounds,
            accelerator="cpu",
            limit_val_batches=0,
            enable_progress_bar=case.bar is not None,
            enable_model_summary=False,
            log_every_n_steps=case.every,
            **case.more,
        )
        data = FederatedData(Noise(), batch_size=10, val_fraction=0, test_fraction=0)
        trainer.fit(FedAvg(MLP(), local_steps=10), data)
        if case.wandb:
            import wandb

            wandb.finish()
    return clock.milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[2])
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=500, help="for each case")
    parser.add_argument("--profile", metavar="CASE", choices=CASES, help="profile it instead")
    arguments = parser.parse_args()
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if arguments.profile:
        profiler = cProfile.Profile()
        run(CASES[arguments.profile], arguments.rounds, profiler)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
        return
    print("| a round without its local steps | median, ms | fastest tenth, ms | at most, ms |")
    print("|---|---|---|---|")
    for case in (CASES[name] for name in arguments.cases):
        times = run(case, arguments.rounds)
        middle, fast = statistics.median(times), statistics.quantiles(times, n=10)[0]
        print(f"| {case.name} | {middle:.2f} | {fast:.2f} | {case.target:.0f} |", flush=True)


if __name__ == "__main__":
    main()
