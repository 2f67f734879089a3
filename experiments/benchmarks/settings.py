"""How to time: what the scripts' command lines share."""

import argparse
import time
from dataclasses import asdict, dataclass

import torch


@dataclass(frozen=True)
class Settings:
    """How to time.

    Attributes:
        engine: Of the federation.
        device: ``cpu`` or ``cuda``.
        clock: ``wall``; or ``cpu``, the time that the process itself computes: what remains
            comparable on a machine that others load, as long as it is one process on a CPU.
        seconds: For each case, without the rounds that warm up.
        warmup: Rounds of pl_fed before the first turn; compiling falls into them.
        turns: At least.
    """

    engine: str = "auto"
    device: str = "cpu"
    clock: str = "wall"
    seconds: float = 10.0
    warmup: int = 5
    turns: int = 9

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Let a command line ask for them."""
        parser.add_argument("--engine", default=cls.engine, help="of the federation")
        parser.add_argument("--device", default=cls.device, choices=["cpu", "cuda"])
        parser.add_argument("--clock", default=cls.clock, choices=["wall", "cpu"])
        parser.add_argument("--seconds", type=float, default=cls.seconds, help="for each row")
        parser.add_argument("--warmup", type=int, default=cls.warmup, help="rounds left out")
        parser.add_argument("--turns", type=int, default=cls.turns, help="at least")

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Settings":
        """Return those that a command line asked for."""
        return cls(**{name: getattr(arguments, name) for name in asdict(cls())})

    def now(self) -> float:
        """Return the time in seconds, after all that a GPU was given is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() if self.clock == "wall" else time.process_time()
