"""Settings of the timing, shared by the command lines of the scripts."""

import argparse
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Settings:
    """Settings of the timing.

    Attributes:
        engine: Engine of the federation.
        device: ``cpu`` or ``cuda``.
        clock: ``wall``, or ``cpu`` for the processor time of the process. The latter is comparable
            on a shared machine, for one process on a CPU.
        seconds: Seconds for each case, without warm-up.
        warmup: Rounds of pl_fed before the first turn, including compilation.
        turns: Smallest number of turns.
        compile_mode: ``mode`` of ``torch.compile``, such as ``reduce-overhead`` for CUDA graphs.
    """

    engine: str = "auto"
    device: str = "cpu"
    clock: str = "wall"
    seconds: float = 10.0
    warmup: int = 5
    turns: int = 9
    compile_mode: str | None = None

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Add the settings to a command line."""
        parser.add_argument("--engine", default=cls.engine, help="of the federation")
        parser.add_argument("--device", default=cls.device, choices=["cpu", "cuda"])
        parser.add_argument("--clock", default=cls.clock, choices=["wall", "cpu"])
        parser.add_argument("--seconds", type=float, default=cls.seconds, help="for each row")
        parser.add_argument("--warmup", type=int, default=cls.warmup, help="rounds left out")
        parser.add_argument("--turns", type=int, default=cls.turns, help="at least")
        parser.add_argument("--compile-mode", help="of torch.compile")

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> "Settings":
        """Return the settings of a command line."""
        return cls(**{name: getattr(arguments, name) for name in asdict(cls())})

    def now(self) -> float:
        """Return the time in seconds, after waiting for the GPU."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() if self.clock == "wall" else time.process_time()


def build_python_path(tree: Path) -> str:
    """Return ``PYTHONPATH`` with a source tree before the folders of carried packages."""
    return os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
