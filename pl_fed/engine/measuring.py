"""How fast engines are for a net, a batch and a device: measured, and written down."""

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pl_fed.engine.base import Chunk

_TIMES = 3  # each engine is timed, in turn with the others
_PROBE_SECONDS = 0.5  # for about so long each time


@dataclass(frozen=True)
class Speed:
    """What an engine costs.

    Attributes:
        step: Seconds that one client's local step takes.
        setup: Seconds that it takes to begin: to compile, above all.
    """

    step: float
    setup: float = 0.0

    def total(self, steps: float) -> float:
        """Return the seconds of so many steps; of endlessly many, of each."""
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
        """Return the seconds of one client's step, in so many steps at most."""
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
    candidates: Mapping[str, Candidate], step: float, fails: type[Exception]
) -> tuple[dict[str, Speed], list[Exception]]:
    """Time engines on the same minibatches, in turn; what they train is thrown away.

    Args:
        candidates: The engines by name.
        step: About the seconds that a step of one client takes.
        fails: What an engine raises that is to be left out.

    Returns:
        The speeds by name, and what was raised.
    """
    setups, most, failed = {}, {}, []
    for name, candidate in candidates.items():
        chunk = candidate.load().shortened(1)
        most[name] = max(1, int(_PROBE_SECONDS / (step * len(chunk.clients))))
        try:
            setups[name] = candidate.seconds(chunk)
        except fails as error:
            failed.append(error)
        except torch.OutOfMemoryError:
            continue  # it is no candidate
    best = dict.fromkeys(setups, math.inf)
    for name in [*setups] * _TIMES:
        best[name] = min(best[name], candidates[name].seconds_per_step(most[name]))
    return {name: Speed(best[name], setups[name]) for name in best}, failed


def speeds_of(saved: Mapping[str, Mapping[str, Any]]) -> dict[str, Speed]:
    """Return speeds that were saved, by the engine's name.

    Raises:
        ValueError: If one cannot have been measured. Other damage gives a ``KeyError``,
            ``TypeError`` or ``AttributeError``.
    """
    speeds = {n: Speed(float(s["step"]), float(s["setup"])) for n, s in saved.items()}
    for name, speed in speeds.items():
        if not (0 < speed.step < math.inf and 0 <= speed.setup < math.inf):
            raise ValueError(f"Expected the speed of {name} to be measured but got {speed}.")
    return speeds


class Notebook:
    """Speeds that were measured on this machine, kept from run to run.

    Args:
        path: A JSON file; by default ``pl_fed/engines.json`` in the user's folder for caches
            (``XDG_CACHE_HOME`` or ``~/.cache``).
    """

    def __init__(self, path: Path | None = None) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.path = path or Path(cache) / "pl_fed" / "engines.json"

    def read(self, shape: Mapping[str, Any]) -> dict[str, Speed]:
        """Return what was measured for a shape; nothing if nothing was, or is to be read."""
        try:
            speeds = speeds_of(self._pages()[_key(shape)]["speeds"])
        except (KeyError, TypeError, ValueError, AttributeError):
            return {}
        return speeds

    def write(self, shape: Mapping[str, Any], speeds: Mapping[str, Speed]) -> None:
        """Note what was measured; a folder that cannot be written to is left alone."""
        page = {"shape": dict(shape), "speeds": {n: asdict(s) for n, s in speeds.items()}}
        pages = {**self._pages(), _key(shape): page}
        temporary = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(pages, indent=1))
            os.replace(temporary, self.path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()

    def _pages(self) -> dict[str, Any]:
        try:
            pages = json.loads(self.path.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return pages if isinstance(pages, dict) else {}


def machine(device: torch.device) -> dict[str, Any]:
    """Return what speeds depend on beside the work."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "host": platform.node(),
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def described(speeds: Mapping[str, Speed]) -> str:
    """Return speeds in words.

    Example:
        >>> described({"one_by_one": Speed(2e-4), "stacked_compiled": Speed(6.4e-5, setup=5.0)})
        'one_by_one 200, stacked_compiled 64 (after 5.0 s)'
    """
    return ", ".join(
        f"{name} {1e6 * speed.step:.0f}" + (f" (after {speed.setup:.1f} s)" * (speed.setup > 1))
        for name, speed in speeds.items()
    )


def _key(shape: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]
