"""How long engines take for a chunk of clients, measured on its first minibatches."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pl_fed.engine.base import Chunk

_REPEATS = 3  # each engine is timed so often, in turn with the others
_PROBE_SECONDS = 0.5  # for about so long each time


@dataclass(frozen=True)
class Speed:
    """The time that an engine takes.

    Attributes:
        step: Seconds for one local step of one client.
        setup: Seconds before the first step: to compile, above all.
    """

    step: float
    setup: float = 0.0

    def total(self, steps: float) -> float:
        """Return the seconds for a number of steps; for infinitely many, those of one step."""
        return self.setup + steps * self.step if math.isfinite(steps) else self.step


@dataclass(frozen=True)
class Candidate:
    """An engine that may turn out the fastest.

    Attributes:
        run: Trains a chunk.
        load: Makes the chunk that it is timed on.
    """

    run: Callable[[Chunk], Any]
    load: Callable[[], Chunk]

    def seconds_per_step(self, most_steps: int) -> float:
        """Return the seconds of one client's step, measured over at most ``most_steps`` steps."""
        chunk = self.load().shortened(most_steps)
        return self.seconds(chunk) / sum(chunk.batches.steps)

    def seconds(self, chunk: Chunk) -> float:
        """Return the seconds that it takes to run a chunk, on a GPU to the end."""
        started = time.perf_counter()
        self.run(chunk)
        if chunk.round.broadcast.parameters.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started


def measure(
    candidates: Mapping[str, Candidate], step: float, failures: type[Exception]
) -> tuple[dict[str, Speed], list[Exception]]:
    """Time engines on the same minibatches, in turn. Their results are thrown away.

    Args:
        candidates: The engines by name.
        step: Estimated seconds for one step of one client.
        failures: Errors of this type leave an engine out.

    Returns:
        The speeds by name, and the errors that left engines out.
    """
    setups, most, errors = {}, {}, []
    for name, candidate in candidates.items():
        chunk = candidate.load().shortened(1)
        most[name] = max(1, int(_PROBE_SECONDS / (step * len(chunk.clients))))
        try:
            setups[name] = candidate.seconds(chunk)
        except failures as error:
            errors.append(error)
        except torch.OutOfMemoryError:
            continue  # it is no candidate
    best = dict.fromkeys(setups, math.inf)
    for name in [*setups] * _REPEATS:
        best[name] = min(best[name], candidates[name].seconds_per_step(most[name]))
    return {name: Speed(best[name], setups[name]) for name in best}, errors


def speeds_of(saved: Mapping[str, Mapping[str, Any]]) -> dict[str, Speed]:
    """Return speeds that were saved, by the engine's name.

    Raises:
        ValueError: If a number cannot have been measured. Other damage raises ``KeyError``,
            ``TypeError`` or ``AttributeError``.
    """
    speeds = {
        name: Speed(float(speed["step"]), float(speed["setup"])) for name, speed in saved.items()
    }
    for name, speed in speeds.items():
        if not (0 < speed.step < math.inf and 0 <= speed.setup < math.inf):
            raise ValueError(f"Expected the speed of {name} to be measured but got {speed}.")
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
