"""Times of engines for a chunk of clients, measured on its first minibatches."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pl_fed.engine.base import Chunk

_REPEATS = 3  # measurements of an engine, in turn with the other engines
_PROBE_SECONDS = 0.5  # approximate duration of a measurement


@dataclass(frozen=True)
class Speed:
    """Speed: the time that an engine takes.

    Attributes:
        step: Seconds for one local step of one client.
        setup: Seconds before the first step, mainly for compiling.
    """

    step: float
    setup: float = 0.0

    def total(self, steps: float) -> float:
        """Return the seconds for a number of steps; for infinitely many steps, those of one."""
        return self.setup + steps * self.step if math.isfinite(steps) else self.step


@dataclass(frozen=True)
class Candidate:
    """Candidate: an engine to be timed.

    Attributes:
        run: Trains a chunk by the engine.
        load: Makes the chunk for the measurement.
    """

    run: Callable[[Chunk], Any]
    load: Callable[[], Chunk]

    def seconds_per_step(self, most_steps: int) -> float:
        """Return the seconds of one client's step, measured over at most ``most_steps`` steps."""
        chunk = self.load().truncate(most_steps)
        return self.seconds(chunk) / sum(chunk.batches.steps)

    def seconds(self, chunk: Chunk) -> float:
        """Return the seconds for a chunk, including all work on the GPU."""
        start = time.perf_counter()
        self.run(chunk)
        if chunk.round.broadcast.parameters.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start


def measure(
    candidates: Mapping[str, Candidate], step: float, failures: type[Exception]
) -> tuple[dict[str, Speed], list[Exception]]:
    """Time engines on the same minibatches, in turn, and discard their results.

    Args:
        candidates: The engines by name.
        step: Estimated seconds for one step of one client.
        failures: Type of the errors that exclude an engine.

    Returns:
        The speeds by name, and the errors of excluded engines.
    """
    setups, most_steps, errors = {}, {}, []
    for name, candidate in candidates.items():
        chunk = candidate.load().truncate(1)
        most_steps[name] = max(1, int(_PROBE_SECONDS / (step * len(chunk.clients))))
        try:
            setups[name] = candidate.seconds(chunk)
        except failures as error:
            errors.append(error)
        except torch.OutOfMemoryError:
            continue  # too large for this machine
    best = dict.fromkeys(setups, math.inf)
    for name in [*setups] * _REPEATS:
        best[name] = min(best[name], candidates[name].seconds_per_step(most_steps[name]))
    return {name: Speed(best[name], setups[name]) for name in best}, errors


def parse_speeds(saved: Mapping[str, Mapping[str, Any]]) -> dict[str, Speed]:
    """Return the speeds of a checkpoint, by the engine's name.

    Raises:
        ValueError: If a time is negative or infinite, or the time of a step is 0. Other damage
            raises ``KeyError``, ``TypeError`` or ``AttributeError``.
    """
    speeds = {
        name: Speed(float(speed["step"]), float(speed["setup"])) for name, speed in saved.items()
    }
    for name, speed in speeds.items():
        if not (0 < speed.step < math.inf and 0 <= speed.setup < math.inf):
            raise ValueError(f"Expected the speed of {name} to be finite times but got {speed}.")
    return speeds


def describe(speeds: Mapping[str, Speed]) -> str:
    """Return speeds in words.

    Example:
        >>> describe({"one_by_one": Speed(2e-4), "stacked_compiled": Speed(6.4e-5, setup=5.0)})
        'one_by_one 200, stacked_compiled 64 (after 5.0 s)'
    """
    return ", ".join(
        f"{name} {1e6 * speed.step:.0f}" + (f" (after {speed.setup:.1f} s)" * (speed.setup > 1))
        for name, speed in speeds.items()
    )
